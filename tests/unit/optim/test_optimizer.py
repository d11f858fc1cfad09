import pytest
import torch
from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.param_groups import ParamGroup


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
