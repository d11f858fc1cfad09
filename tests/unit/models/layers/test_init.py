import pytest
import torch
from torch import nn

from torchtitan.models.layers.init import Initializer, fill, init_weights
from torchtitan.models.layers.linear import Linear
from torchtitan.models.layers.norm import RMSNorm


def make(seed=0):
    module = nn.ModuleDict({"a": Linear(8, 4, init_std=0.5), "n": RMSNorm(8)})
    init_weights(module, seed)
    return module


def test_values_depend_on_seed_and_name_only():
    assert torch.equal(make()["a"].weight, make()["a"].weight)
    assert not torch.equal(make()["a"].weight, make(seed=1)["a"].weight)
    larger = nn.ModuleDict({"first": Linear(8, 4, init_std=0.5), "a": Linear(8, 4, init_std=0.5)})
    init_weights(larger, 0)
    assert torch.equal(larger["a"].weight, make()["a"].weight)
    assert not torch.equal(larger["first"].weight, larger["a"].weight)


def test_distribution():
    weight = torch.empty(3000, 2000)  # spans several blocks
    fill(weight, "w", Initializer(std=0.02), seed=3)
    assert weight.mean().abs() < 1e-4
    assert weight.std().item() == pytest.approx(
        0.02 * 0.9866, rel=1e-2
    )  # of a normal cut at 3 sigma
    assert weight.abs().max() <= 0.06
    assert not torch.equal(weight[:900], weight[2100:])
    assert make()["n"].weight.eq(1).all()


def test_a_parameter_without_an_initializer_is_named():
    with pytest.raises(TypeError, match=r"'a.weight' has no initializer.*Linear.initializers"):
        init_weights(nn.ModuleDict({"a": nn.Linear(2, 2)}), 0)
