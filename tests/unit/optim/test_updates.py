import pytest
import torch
from torch import nn

from torchtitan.optim.clipping import Clip
from torchtitan.optim.muon import Muon
from torchtitan.optim.optimizer import AdamW, Optimizer
from torchtitan.optim.param_groups import ParamGroup
from torchtitan.optim.sgd import SGD
from torchtitan.optim.updates import AfterBackward, InBackward, make_updates

GOOD = torch.zeros(())
GROUPS = [ParamGroup.Config(pattern="*.bias", lr_scale=0.3, weight_decay=0.2)]
KINDS: dict[str, Optimizer.Config] = {
    "adamw": AdamW.Config(lr=0.01, param_groups=GROUPS),
    "adamw bfloat16": AdamW.Config(lr=0.01, state_dtype="bfloat16", param_groups=GROUPS),
    "adamw int8": AdamW.Config(lr=0.01, state_dtype="int8", param_groups=GROUPS),
    "adamw int4": AdamW.Config(lr=0.01, state_dtype="int4", param_groups=GROUPS),
    "adamw float8": AdamW.Config(lr=0.01, state_dtype="float8", param_groups=GROUPS),
    "muon": Muon.Config(lr=0.01, param_groups=GROUPS),
    "muon int8": Muon.Config(lr=0.01, state_dtype="int8", param_groups=GROUPS),
    "sgd": SGD.Config(lr=0.01, param_groups=GROUPS),
    "sgd nesterov int8": SGD.Config(lr=0.01, nesterov=True, state_dtype="int8"),
    "sgd without momentum": SGD.Config(lr=0.01, momentum=0.0, weight_decay=0.1),
}


def model(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).to(dtype)


def loss_of(module: nn.Module, step: int):
    dtype = next(module.parameters()).dtype
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (module(inputs) - 0.3).square().sum()


def train(config: Optimizer.Config, clip: Clip, *, in_backward, steps=4, dtype=torch.float32):
    """Weights, state and norms of a short run whose rate changes each step."""
    module = model(dtype)
    optimizer = config.build(module.named_parameters())
    updates = make_updates(optimizer, clip, in_backward=in_backward)
    norms = []
    for step in range(steps):
        optimizer.set_lr_factor(1 / (step + 1))
        updates.begin(GOOD)
        loss_of(module, step).backward()
        norms.append(updates.clip())
        updates.finish(GOOD)
        optimizer.zero_grad()
    return {**dict(module.named_parameters()), **optimizer.state_tensors()}, torch.stack(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_backward_every_bit_is_the_same(kind, max_norm, dtype):
    clip = Clip(max_norm, "parameter")
    plain, norms = train(KINDS[kind], clip, in_backward=False, dtype=dtype)
    early, early_norms = train(KINDS[kind], clip, in_backward=True, dtype=dtype)
    assert plain.keys() == early.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, early[name]), name
    assert torch.allclose(norms, early_norms, rtol=1e-6)
    assert not torch.equal(plain["0.weight"], model(dtype)[0].weight)


def test_each_gradient_is_clipped_by_its_own_norm():
    module = model()
    optimizer = SGD.Config(lr=1.0, momentum=0.0, weight_decay=0.0).build(module.named_parameters())
    updates = AfterBackward(optimizer, Clip(0.5, "parameter"))
    loss_of(module, 0).backward()
    before = {name: p.grad.norm() for name, p in module.named_parameters()}
    norm = updates.clip()
    assert norm.item() == pytest.approx(torch.stack(list(before.values())).norm().item(), rel=1e-5)
    for name, p in module.named_parameters():
        assert before[name] > 0.5
        assert p.grad.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_one_gradient_at_a_time_is_alive():
    """Without FSDP a unit is a parameter; `tests/distributed/test_optimizers.py` counts with it."""
    module = model()
    optimizer = AdamW.Config().build(module.named_parameters())
    alive = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in module.parameters()))
        )
    updates = InBackward(optimizer, Clip())
    updates.begin(GOOD)
    loss_of(module, 0).backward()
    assert alive == [1, 1, 1, 1]
    assert all(p.grad is None for p in module.parameters())


def test_a_bad_gradient_masks_its_update_and_those_after_it_and_shows_in_the_norm():
    module = model()
    optimizer = AdamW.Config(lr=0.1).build(module.named_parameters())
    updates = InBackward(optimizer, Clip())
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module[2].weight.register_hook(lambda grad: grad * float("nan"))
    updates.begin(GOOD)
    loss_of(module, 0).backward()
    assert updates.clip().isnan()
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
    assert moved <= {"2.bias"}  # complete before, or at the same time
    assert optimizer.slots[module[2].weight].step == 0

    updates.begin(torch.ones(()))  # no later step may update
    now = module[2].bias.detach().clone()
    loss_of(module, 1).backward()
    assert torch.equal(module[2].bias, now)


def test_the_norm_of_all_is_refused():
    optimizer = AdamW.Config().build(model().named_parameters())
    with pytest.raises(ValueError, match=r"max_norm=1.0 of all gradients together is not known"):
        InBackward(optimizer, Clip(1.0, "all"))
