import pytest
import torch
from torch import nn

from torchtitan import torch_api
from torchtitan.errors import ConfigError
from torchtitan.metrics.probes import WeightNorm, global_norm


def test_norm_of_chosen_parameters():
    models = {"policy": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "critic": nn.Linear(2, 1)}
    norm = WeightNorm.Config(pattern="policy.*.weight").build()(models)["weight_norm"]
    weights = torch.cat([models["policy"][i].weight.detach().flatten() for i in (0, 1)])
    assert float(norm) == pytest.approx(float(weights.norm()), rel=1e-6)
    everything = WeightNorm.Config(name="all").build()(models)["all"]
    flat = torch.cat([p.detach().flatten() for m in models.values() for p in m.parameters()])
    assert float(everything) == pytest.approx(float(flat.norm()), rel=1e-6)


def test_half_precision_weights_are_summed_in_float32():
    weights = [torch.randn(300, 300, dtype=torch.bfloat16) for _ in range(3)]
    exact = torch.cat([w.double().flatten() for w in weights]).norm()
    assert float(global_norm(weights)) == pytest.approx(float(exact), rel=1e-5)


def test_pattern_without_a_match_is_an_error():
    probe = WeightNorm.Config(pattern="policy.head.*").build()
    with pytest.raises(
        ConfigError,
        match=r"pattern='policy.head.\*' matches none of 2 parameters \(such as policy.weight, policy.bias\)",
    ):
        probe({"policy": nn.Linear(2, 2)})


def _check_norm_over_shards():
    mesh = torch_api.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2)]
    placements = [torch_api.Shard(0), torch_api.Shard(0), torch_api.Replicate()]
    parts = [
        torch_api.distribute_tensor(t, mesh, [p]) for t, p in zip(whole, placements, strict=True)
    ]
    plain = torch.randn(6)
    expected = torch.cat([t.flatten() for t in [*whole, plain]]).norm()
    torch.testing.assert_close(global_norm([*parts, plain]), expected)


def test_norm_over_shards_is_global(ranks):
    ranks(_check_norm_over_shards, 2)
