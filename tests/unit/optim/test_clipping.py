import pytest
import torch
from torch import nn

from torchtitan.optim.clipping import clip_gradients, global_grad_norm


def parameters(*grads):
    out = []
    for grad in grads:
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad
        out.append(parameter)
    return out


def test_norm_is_that_of_all_gradients_together():
    params = parameters(torch.tensor([3.0]), torch.tensor([[0.0, 4.0]]))
    params.append(nn.Parameter(torch.ones(2)))  # without a gradient
    assert global_grad_norm(params).item() == 5.0
    assert global_grad_norm([]).item() == 0.0


def test_norm_of_bfloat16_gradients_is_taken_in_float32():
    grads = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    norm = global_grad_norm(parameters(grads, grads.clone()))
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(8192**0.5, rel=1e-6)


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, 1.0), (10.0, 5.0)])
def test_clip_scales_down_only(max_norm, expected):
    params = parameters(torch.tensor([3.0]), torch.tensor([4.0]))
    clip_gradients(params, global_grad_norm(params), max_norm)
    assert global_grad_norm(params).item() == pytest.approx(expected, rel=1e-5)


def test_norm_of_millions_of_elements_keeps_its_digits():
    grad = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    exact = grad.double().norm().item()
    assert global_grad_norm(parameters(grad)).item() == pytest.approx(exact, rel=1e-6)
