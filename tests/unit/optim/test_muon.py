import pytest
import torch
from torch import nn

from torchtitan.optim.muon import Muon, newton_schulz

RUN = torch.zeros(())


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("scale", ["adamw", "shape"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torchs_muon(shape, scale, nesterov):
    ours, theirs = (nn.Parameter(matrix(*shape)) for _ in range(2))
    config = Muon.Config(lr=0.02, weight_decay=0.1, scale=scale, nesterov=nesterov)
    optimizer = config.build([("w", ours)])
    reference = torch.optim.Muon(
        [theirs],
        lr=0.02,
        weight_decay=0.1,
        nesterov=nesterov,
        adjust_lr_fn={"adamw": "match_rms_adamw", "shape": "original"}[scale],
    )
    start = ours.detach().clone()
    for step in range(3):
        ours.grad, theirs.grad = (matrix(*shape, seed=10 + step) for _ in range(2))
        optimizer.step(RUN)
        reference.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() / moved < 5e-3  # the iteration is in bfloat16, with other kernels


def test_singular_values_are_near_one():
    values = torch.linalg.svdvals(newton_schulz(matrix(48, 64), 5).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_each_matrix_of_a_stack_is_its_own():
    stack = matrix(3, 24, 40)
    alone = torch.stack([newton_schulz(part, 5) for part in stack])
    assert torch.allclose(newton_schulz(stack, 5).float(), alone.float(), atol=2e-2)


@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24)], ids=["wide", "tall"])
def test_a_stack_is_updated_as_its_matrices(shape):
    torch.manual_seed(0)
    values, grad = torch.randn(shape), torch.randn(shape)
    moved = []
    for parts in (values[None], values):  # the stack, and each of its matrices
        for part, own in zip(parts, grad[None] if parts.ndim == 4 else grad, strict=True):
            parameter = nn.Parameter(part.clone())
            optimizer = Muon.Config(lr=0.1).build([("layers.0.experts.weight", parameter)])
            parameter.grad = own.clone()
            optimizer.step(torch.zeros(()))
            moved.append(parameter.detach())
    stack, *alone = moved
    torch.testing.assert_close(stack, torch.stack(alone), rtol=0, atol=2e-3)
    assert not torch.equal(stack, values)


def test_vectors_embeddings_and_heads_are_adamws():
    names = {
        "embedding.weight": (32, 8),
        "layers.0.attention.q_proj.weight": (8, 8),
        "layers.0.moe.router.gate.weight": (4, 8),
        "layers.0.norm.weight": (8,),
        "head.weight": (32, 8),
    }
    parameters = [(name, nn.Parameter(matrix(*shape))) for name, shape in names.items()]
    optimizer = Muon.Config(lr=0.1).build(parameters)
    states = {s.name: set(s.states) for s in optimizer.slots.values()}
    adamw = {"exp_avg", "exp_avg_sq"}
    assert states.pop("layers.0.attention.q_proj.weight") == {"momentum_buffer"}
    assert states == dict.fromkeys(states, adamw)

    before = {name: p.detach().clone() for name, p in parameters}
    for _, p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step(RUN)
    assert not any(torch.equal(p, before[name]) for name, p in parameters)
    assert torch.allclose(
        before["head.weight"] * (1 - 0.1 * 0.1) - 0.1, parameters[-1][1]
    )  # AdamW's first


def test_checks():
    problems = list(Muon.Config(momentum=1.0, iterations=0, lr=-1.0).check())
    assert [p.path for p in problems] == ["lr", "momentum", "iterations"]
