import pytest
import torch

from torchtitan.models.layers.init import init_weights
from torchtitan.models.layers.router import Router


def make(**settings):
    router = Router.Config(**{"top_k": 2, **settings}).build(dim=16, n_experts=8, init_std=1.0)
    init_weights(router, seed=3)
    return router


def written_out(router, tokens):
    """One token at a time, with Python's own sorting."""
    config, chosen, weights = router.config, [], []
    bias = [0.0] * 8 if router.expert_bias is None else router.expert_bias.tolist()
    for token in tokens:
        logits = (router.gate.weight @ token).double()
        if config.score == "softmax":
            scores = (logits.exp() / logits.exp().sum()).tolist()
        else:
            scores = (1 / (1 + (-logits).exp())).tolist()
        biased = [s + b for s, b in zip(scores, bias, strict=True)]
        size = 8 // config.n_groups
        groups = [range(g * size, (g + 1) * size) for g in range(config.n_groups)]
        best = 1 if config.group_score == "max" else 2
        strength = [sum(sorted(biased[e] for e in group)[-best:]) for group in groups]
        open_groups = sorted(range(len(groups)), key=lambda g: -strength[g])[: config.top_groups]
        candidates = [e for g in open_groups for e in groups[g]]
        picked = sorted(candidates, key=lambda e: -biased[e])[: config.top_k]
        kept = [scores[e] for e in picked]
        total = sum(kept) if config.normalize else 1.0
        chosen.append(picked)
        weights.append([config.scale * w / total for w in kept])
    return torch.tensor(chosen), torch.tensor(weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize": False, "scale": 16.0},
        {"scale": 2.5, "bias_rate": 0.1},
        {"n_groups": 4, "top_groups": 2, "bias_rate": 0.0},
        {"n_groups": 2, "top_groups": 1, "group_score": "max", "top_k": 3},
    ],
    ids=str,
)
def test_routing_equals_the_rule_written_out(score, settings):
    router = make(score=score, **settings)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    tokens = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    routing = router(tokens)
    chosen, weights = written_out(router, tokens)
    assert torch.equal(routing.experts, chosen)
    torch.testing.assert_close(routing.weights, weights)
    torch.testing.assert_close(routing.probabilities.sum(1), torch.ones(50))


def test_bias_changes_the_choice_but_no_weight():
    router = make(score="sigmoid", bias_rate=0.1, top_k=8)
    tokens = torch.randn(5, 16)
    before = router(tokens)
    router.expert_bias.copy_(torch.arange(8).float())
    after = router(tokens)
    assert after.experts.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]] * 5
    for old, new in zip(
        (before.experts, before.weights), (after.experts, after.weights), strict=True
    ):
        assert old.shape == new.shape
    order = before.experts.argsort(1)
    torch.testing.assert_close(before.weights.gather(1, order), after.weights.flip(1))


def test_gate_is_in_float32_whatever_the_activations():
    router = make()
    tokens = torch.randn(5, 16).bfloat16()
    torch.testing.assert_close(
        router.gate(tokens), tokens.float() @ router.gate.weight.t(), rtol=0, atol=0
    )


def test_bias_follows_the_load_and_sums_to_zero():
    router = make(bias_rate=0.01)
    counts = torch.tensor([5.0, 1, 3, 3, 0, 6, 3, 3], dtype=torch.float64)
    want = torch.zeros(8)
    for _ in range(3):
        router.balance(counts, torch.zeros(()))
        direction = torch.tensor([-1.0, 1, 0, 0, 1, -1, 0, 0])
        want += 0.01 * direction
    torch.testing.assert_close(router.expert_bias, want)
    uneven = torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1])
    router.balance(uneven, torch.zeros(()))  # 7 rise, 1 falls: the mean is taken off
    assert router.expert_bias.sum().abs() < 1e-7
    before = router.expert_bias.clone()
    router.balance(uneven, torch.ones(()))  # a step that changed no weight
    assert torch.equal(router.expert_bias, before)


def test_bias_of_rate_0_stays_and_none_has_no_buffer():
    router = make(bias_rate=0.0)
    router.balance(torch.arange(8.0), torch.zeros(()))
    assert router.expert_bias.eq(0).all()
    router = make()
    router.balance(torch.arange(8.0), torch.zeros(()))
    assert list(router.state_dict()) == ["gate.weight"]


@pytest.mark.parametrize(
    ("settings", "path", "text"),
    [
        (
            {"n_groups": 3},
            "n_groups",
            "n_groups=3: does not divide n_experts=8; choose one of [1, 2, 4, 8]",
        ),
        (
            {"n_groups": 4, "top_k": 3},
            "top_k",
            "top_k=3: is more than the 2 experts that a token may choose from (n_experts=8 / n_groups=4 * "
            "top_groups=1); set at most 2",
        ),
        ({"n_groups": 8}, "top_k", "top_k=2: is more than the 1 experts"),
        (
            {"n_groups": 8, "top_k": 1},
            "group_score",
            "group_score=top2_sum: needs two experts in a group",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(settings, path, text):
    problems = list(Router.Config(**{"top_k": 2, **settings}).check_experts(8))
    assert problems[0].path == path
    assert str(problems[0]).startswith(text)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"top_k": 0}, "top_k=0: is not positive; set at least 1"),
        ({"scale": 0.0}, "scale=0.0: is not positive; set 1 for none"),
        ({"n_groups": 0}, "n_groups=0: is not positive; set 1 for none"),
        (
            {"n_groups": 2, "top_groups": 3},
            "top_groups=3: is not between 1 and n_groups=2; choose from that range",
        ),
        (
            {"bias_rate": -1.0},
            "bias_rate=-1.0: is negative; set one such as 0.001, or None for no bias",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    config = Router.Config(**{"top_k": 2, **settings})
    (problem,) = config.check()
    assert str(problem) == text
    assert list(config.check_experts(8)) == []
