import pytest
import torch
from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.optim.muon import Muon
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.param_groups import ParamGroup
from torchtitan.optim.sgd import SGD


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})


def set_grads(module, value=1.0):
    for p in module.parameters():
        p.grad = torch.full_like(p, value)


def test_steps_equal_torchs_adamw_with_decay_on_matrices_only():
    ours, theirs = model(), model()
    optimizer = AdamW.Config(lr=0.1, weight_decay=0.3).build(ours.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(3):
        set_grads(ours, step + 1.0)
        set_grads(theirs, step + 1.0)
        optimizer.step(torch.zeros(()))
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_skipped_step_changes_no_weight_and_no_state():
    module = model()
    optimizer = AdamW.Config(lr=0.1).build(module.named_parameters())
    set_grads(module)
    optimizer.step(torch.zeros(()))
    before = {
        n: t.clone() for n, t in [*module.named_parameters(), *optimizer.state_tensors().items()]
    }
    set_grads(module, float("nan"))
    optimizer.step(torch.ones(()))
    for name, tensor in [*module.named_parameters(), *optimizer.state_tensors().items()]:
        assert torch.equal(tensor, before[name]), name


def test_state_exists_from_the_start_under_parameter_names():
    optimizer = AdamW.Config().build(model().named_parameters())
    assert set(optimizer.state_tensors()) == {
        f"{p}.{s}"
        for p in ("a.weight", "a.bias", "b.weight", "b.bias")
        for s in ("step", "exp_avg", "exp_avg_sq")
    }


def test_groups_by_pattern():
    module = model()
    config = AdamW.Config(
        lr=1.0,
        weight_decay=0.5,
        param_groups=[
            ParamGroup.Config(pattern="a.*", lr_scale=0.1),
            ParamGroup.Config(pattern="*.bias", weight_decay=0.2),
        ],
    )
    optimizer = config.build(module.named_parameters())
    assert optimizer.set_lr_factor(0.5) == pytest.approx(0.05)
    found = {
        slot.name: (slot.group.lr, slot.group.weight_decay) for slot in optimizer.slots.values()
    }
    assert found == {
        "a.weight": (pytest.approx(0.05), 0.5),
        "a.bias": (pytest.approx(0.05), 0.0),
        "b.weight": (0.5, 0.5),
        "b.bias": (0.5, 0.2),
    }


def test_a_pattern_without_a_parameter_is_an_error():
    config = AdamW.Config(param_groups=[ParamGroup.Config(pattern="layers.*")])
    with pytest.raises(ConfigError, match=r"\['layers.\*'\] match none of the 4 trainable"):
        config.build(model().named_parameters())


def test_checks():
    problems = list(AdamW.Config(lr=-1.0, weight_decay=-0.1, betas=(0.9, 1.0), eps=-1.0).check())
    assert [p.path for p in problems] == ["lr", "weight_decay", "betas", "eps"]
    group = ParamGroup.Config(pattern="x", lr_scale=-1.0, weight_decay=-1.0)
    assert [p.path for p in group.check()] == ["lr_scale", "weight_decay"]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_with_decoupled_decay(momentum, nesterov):
    nesterov = nesterov and momentum > 0
    ours, theirs = model(), model()
    config = SGD.Config(lr=0.1, weight_decay=0.3, momentum=momentum, nesterov=nesterov)
    optimizer = config.build(ours.named_parameters())
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov)
    for step in range(3):
        set_grads(ours, step + 1.0)
        set_grads(theirs, step + 1.0)
        optimizer.step(torch.zeros(()))
        with torch.no_grad():
            for p in theirs.parameters():
                p.mul_(1 - 0.1 * (0.3 if p.ndim > 1 else 0))
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    problems = [*SGD.Config(momentum=1.0).check(), *SGD.Config(momentum=0.0, nesterov=True).check()]
    assert [str(p) for p in problems] == [
        "momentum=1.0: is not in [0, 1); set one such as 0.9",
        "nesterov=True: needs momentum, which is 0; set momentum=0.9",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8", "int4", "float8"])
@pytest.mark.parametrize("kind", [AdamW, SGD, Muon])
def test_a_skipped_step_changes_nothing_however_state_is_stored(kind, state_dtype, dtype):
    module = nn.Linear(64, 64).to(dtype)
    optimizer = kind.Config(lr=0.1, state_dtype=state_dtype).build(module.named_parameters())
    set_grads(module)
    optimizer.step(torch.zeros(()))
    tensors = [*module.named_parameters(), *optimizer.state_tensors().items()]
    before = {n: t.detach().clone() for n, t in tensors}
    set_grads(module, float("nan"))
    optimizer.step(torch.ones(()))
    for name, tensor in tensors:
        assert torch.equal(tensor, before[name]), name


def descend(config, steps=60):
    """Loss of a linear regression after ``steps``."""
    g = torch.Generator().manual_seed(0)
    truth, inputs = torch.randn(64, 64, generator=g), torch.randn(256, 64, generator=g)
    module = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = config.build(module.named_parameters())
    for _ in range(steps):
        loss = (module(inputs) - inputs @ truth.T).square().mean()
        loss.backward()
        optimizer.step(torch.zeros(()))
        optimizer.zero_grad()
    return loss.item()


# int4 is slower: a second moment is at least a 16th of the largest of its block, so small gradients take small steps.
@pytest.mark.parametrize(
    ("state_dtype", "share"), [("bfloat16", 50), ("int8", 50), ("float8", 50), ("int4", 10)]
)
def test_low_bit_state_descends_like_float32(state_dtype, share):
    start, full = descend(AdamW.Config(), 1), descend(AdamW.Config(lr=0.05))
    assert full < start / 50
    assert descend(AdamW.Config(lr=0.05, state_dtype=state_dtype)) < start / share


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_200_updates_of_1e_4_move_bfloat16_weights_as_float32_ones(rounding, monkeypatch):
    if rounding == "nearest":  # the test can fail: this is what stochastic rounding is for
        monkeypatch.setattr(
            "torchtitan.optim.optimizer.stochastic_round", lambda values, _: values.bfloat16()
        )
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        parameter = nn.Parameter(weight.to(dtype, copy=True))
        config = SGD.Config(lr=1e-4, momentum=0.0, weight_decay=0.0)
        optimizer = config.build([("w", parameter)])
        for _ in range(200):
            parameter.grad = -parameter.detach().clone()  # each update is 1e-4 of the weight
            optimizer.step(torch.zeros(()))
        moved[dtype] = (parameter.detach().double() / weight.double() - 1).mean().item()
    assert moved[torch.float32] == pytest.approx(0.0202, rel=1e-2)
    if rounding == "nearest":
        assert moved[torch.bfloat16] == 0
    else:
        assert moved[torch.bfloat16] == pytest.approx(moved[torch.float32], rel=0.05)
