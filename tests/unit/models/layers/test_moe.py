import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torchtitan.models.layers.balance import AuxLoss
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.init import init_weights
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.router import Router

NORMALIZER = torch.tensor(37.0)


def config(**changes):
    return MoE.Config(
        **{
            "n_experts": 8,
            "ffn_dim": 24,
            "router": Router.Config(top_k=3, score="sigmoid", bias_rate=0.0),
            **changes,
        }
    )


def make(**changes):
    layer = config(**changes).build(dim=16, init_std=0.3, residual_std=0.2)
    init_weights(layer, seed=5)
    return layer


def inputs(batch=3, seq=10):
    return torch.randn(batch, seq, 16, generator=torch.Generator().manual_seed(2))


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def written_out(layer, hidden_states):
    """Token by token, expert by expert."""
    tokens = hidden_states.flatten(0, 1)
    routing = layer.router(tokens)
    out = []
    stacks = [stack.weight for stack in layer.experts.stacks()]
    for token, chosen, weights in zip(tokens, routing.experts, routing.weights, strict=True):
        parts = [
            w * swiglu(token, *(stack[e] for stack in stacks))
            for e, w in zip(chosen.tolist(), weights, strict=True)
        ]
        out.append(torch.stack(parts).sum(0))
    total = torch.stack(out).view_as(hidden_states)
    return total if layer.shared is None else total + layer.shared(hidden_states)


@pytest.mark.parametrize("matmul", ["grouped", "loop"])
@pytest.mark.parametrize("shared", [None, SwiGLU.Config(ffn_dim=40)], ids=["alone", "shared"])
def test_layer_equals_experts_written_out(matmul, shared):
    layer = make(matmul=matmul, shared=shared)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    out, want = layer(x), written_out(layer, y)
    torch.testing.assert_close(out, want)
    upstream = torch.randn_like(out)
    parameters = list(layer.parameters())
    got = torch.autograd.grad((out * upstream).sum(), [x, *parameters])
    expected = torch.autograd.grad((want * upstream).sum(), [y, *parameters])
    for a, b in zip(got, expected, strict=True):
        assert b.norm() > 0
        torch.testing.assert_close(a, b)


def test_grouped_and_loop_run_in_bfloat16():
    outs = []
    for matmul in ("grouped", "loop"):
        layer = make(matmul=matmul).bfloat16()
        layer(inputs().bfloat16()).square().sum().backward()
        outs.append([layer(inputs().bfloat16()), *(p.grad for p in layer.parameters())])
    for a, b in zip(*outs, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def aux_loss_written_out(layer, hidden_states, scope):
    """The loss with its gradient left to autograd: T * sum_i f_i P_i for each scope, over the normalizer."""
    tokens = hidden_states.flatten(0, 1)
    routing = layer.router(tokens)
    scores = (tokens @ layer.router.gate.weight.t()).sigmoid()
    probabilities = scores / scores.sum(1, keepdim=True)
    chosen = F.one_hot(routing.experts, 8).sum(1).float()  # (T, E)
    seq = hidden_states.shape[1] if scope == "sequence" else len(tokens)
    total = torch.zeros(())
    for p, c in zip(probabilities.split(seq), chosen.split(seq), strict=True):
        fractions = 8 / (3 * seq) * c.sum(0)
        total = total + seq * (fractions * p.mean(0)).sum()
    return layer.aux_loss.config.coefficient * total / NORMALIZER


@pytest.mark.parametrize("scope", ["sequence", "rank", "micro_batch"])
def test_auxiliary_loss_has_the_gradient_of_the_formula(scope):
    layer = make(aux_loss=AuxLoss.Config(coefficient=0.7, scope=scope))
    layer.before_step(NORMALIZER)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    (layer(x).sum() / NORMALIZER).backward()
    got = [x.grad, layer.router.gate.weight.grad]
    loss = aux_loss_written_out(layer, y, scope)
    total = written_out(layer, y).sum() / NORMALIZER + loss
    want = torch.autograd.grad(total, [y, layer.router.gate.weight])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    readings = layer.readings("layer", layer.step_sums())
    assert readings["moe_aux_loss"].value.item() == pytest.approx(loss.item(), rel=1e-6)


def test_equal_load_costs_the_coefficient_per_token():
    layer = make(aux_loss=AuxLoss.Config(coefficient=0.25))
    experts = torch.arange(24).view(1, 8, 3) % 8
    costs = layer.aux_loss.costs(experts, 8, layer.dispatcher)
    torch.testing.assert_close(costs, torch.full((1, 8), 0.25))


def run(layer, recompute, n_microbatches=2):
    layer.zero_grad()
    layer.before_step(NORMALIZER)
    for i in range(n_microbatches):
        x = inputs(batch=2 + i).requires_grad_()
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.square().sum().backward()
    return layer.step_sums(), [p.grad.clone() for p in layer.parameters()]


@pytest.mark.parametrize("aux_loss", [None, AuxLoss.Config(coefficient=0.5)], ids=["none", "aux"])
def test_recomputation_counts_nothing_twice(aux_loss):
    layer = make(aux_loss=aux_loss)
    sums, grads = run(layer, recompute=False)
    again, regrads = run(layer, recompute=True)
    assert sums[:8].sum() == (2 + 3) * 10 * 3
    torch.testing.assert_close(again, sums, rtol=0, atol=0)
    for a, b in zip(regrads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_evaluation_leaves_no_trace():
    layer = make(aux_loss=AuxLoss.Config(coefficient=0.5))
    with torch.no_grad():
        layer(inputs())  # needs no before_step
    layer.before_step(NORMALIZER)
    with torch.no_grad():
        layer(inputs())
    assert layer.step_sums().eq(0).all()


def test_auxiliary_loss_without_its_normalizer_is_refused():
    layer = make(aux_loss=AuxLoss.Config(coefficient=0.5))
    with pytest.raises(RuntimeError, match=r"call before_step\(normalizer\) before the forward"):
        layer(inputs())


def test_readings():
    layer = make(log_experts=True)
    sums = torch.tensor([6.0, 2, 2, 2, 1, 1, 1, 1, 0, 0], dtype=torch.float64)
    readings = layer.readings("layers.3.feed_forward", sums)
    assert readings["moe_load_max"].value == 3
    assert readings["moe_load_min"].value == 0.5
    assert readings["moe_dropped_tokens"].value == 0
    assert readings["moe_tokens.layers.3.feed_forward.0"].value == 6
    assert "moe_aux_loss" not in readings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_experts": 0}, "n_experts=0: is not positive; set at least 1"),
        ({"ffn_dim": 20}, "matmul=grouped: needs rows of whole 16 bytes, but ffn_dim=20 is not a multiple of 8; set ffn_dim to 24, or matmul to loop"),
        ({"router": Router.Config(top_k=9)}, "router.top_k=9: is more than the 8 experts"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(changes, text):
    (problem,) = config(**changes).check()
    assert str(problem).startswith(text)


def test_a_width_that_the_grouped_matmul_lacks_is_refused():
    (problem,) = config().check_dim(20)
    assert str(problem).startswith(
        "matmul=grouped: needs rows of whole 16 bytes, but dim=20 is not a"
    )
    assert list(config(matmul="loop").check_dim(20)) == []


def test_degrees_that_do_not_divide_the_experts_are_refused():
    (problem,) = config().check_ep(3, 12)
    assert str(problem) == (
        "n_experts=8: does not divide by the parallelism.ep=3 ranks that share the experts; "
        "set parallelism.ep to one of [1, 2, 4]"
    )
    assert list(config().check_ep(4, 12)) == []


def test_a_coefficient_of_0_is_refused():
    (problem,) = AuxLoss.Config(coefficient=0.0).check()
    assert (
        str(problem)
        == "coefficient=0.0: is not positive; set one such as 0.001, or aux_loss to None"
    )
