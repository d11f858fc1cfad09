"""The closed form against tensors counted on fake ranks."""

import pytest

from tests.unit.planner.cases import MOE, QK_NORM, small
from torchtitan.errors import ConfigError
from torchtitan.models.layers.head import Head
from torchtitan.optim.muon import Muon
from torchtitan.planner.verify import Tracked, Verification, plan_tracked, track, verify

LOW_BIT = {"in_backward": True, "state_dtype": "int8", "parameter_dtype": "bfloat16"}
LARGE = {"model": {"dim": 256, "vocab_size": 32768}}
GRID = {
    "8 ranks": (8, {}),
    "8 ranks, recomputed": (8, {"recompute": "full"}),
    "8 ranks, selective": (8, {"recompute": "selective"}),
    "8 ranks, kept gathered": (8, {"reshard": False, "recompute": "full"}),
    "8 ranks, accumulated": (8, {"global_batch_rows": 16, "micro_batch_rows": 1}),
    "2 copies of 4": (8, {"mesh": {"dp_replicate": 2}}),
    "4 ranks, large vocabulary": (4, LARGE),
    "4 ranks, tied": (4, {"model": {"tied": True}}),
    "4 ranks, norm of heads": (4, {"model": QK_NORM}),
    "4 ranks, experts": (4, {"model": MOE}),
    "4 ranks, bfloat16": (4, {"parameter_dtype": "bfloat16", "state_dtype": "bfloat16"}),
    "4 ranks, low bits in the backward": (4, {"recompute": "full", **LOW_BIT}),
    "1 rank, low bits in the backward": (1, {"recompute": "full", **LOW_BIT}),
    "1 rank, recomputed": (1, {"recompute": "full"}),
    "1 rank, large vocabulary in the backward": (1, {**LARGE, **LOW_BIT}),
    "2 ranks, large vocabulary in the backward": (2, {"recompute": "full", **LARGE, **LOW_BIT}),
    "4 ranks, muon": (4, {"optimizer": Muon.Config()}),
    "2 ranks, vocabulary walked": (
        2,
        {"model": {"head": Head.Config(weight_gradient="by_vocabulary", chunk_tokens=256)}},
    ),
    "2 ranks, soft cap": (2, {"model": {"head": Head.Config(softcap=30.0)}}),
    "tp": (4, {"mesh": {"tp": 2}}),
    "tp without sequence parallel": (4, {"mesh": {"tp": 2, "sequence_parallel": False}}),
}
QUICK = (
    "8 ranks, recomputed",
    "2 ranks, large vocabulary in the backward",
    "4 ranks, muon",
    "tp",
)


def error(name):
    world_size, changes = GRID[name]
    config = small(**changes)
    return plan_tracked(config, world_size) / max(track(config, world_size).values()) - 1


@pytest.mark.parametrize("name", QUICK)
def test_closed_form_is_what_is_counted(name):
    assert abs(error(name)) <= 0.06


@pytest.mark.slow
def test_closed_form_over_a_dozen_configurations():
    errors = {name: error(name) for name in GRID}
    sizes = [abs(e) for e in errors.values()]
    assert max(sizes) <= 0.06, errors
    assert sum(sizes) / len(sizes) <= 0.03, errors


def test_two_and_four_layers_tell_how_much_six_take():
    config = small(recompute="full", model={"n_layers": 6})
    found = verify(config, 2)
    assert [t.layers for t in found.tracked] == [2, 4]
    assert found.extrapolated == pytest.approx(max(track(config, 2).values()), rel=0.01)
    assert abs(found.error) <= 0.06
    assert "6 layers:" in str(found)
    assert "extrapolated" in str(found)


@pytest.mark.parametrize("n_layers", [1, 3, 4])
def test_a_model_of_few_layers_is_counted_itself(n_layers):
    found = verify(small(recompute="full", model={"n_layers": n_layers}), 1)
    assert found.extrapolated == found.tracked[-1].peak
    assert found.tracked[-1].layers == n_layers
    assert abs(found.error) < 0.03


def test_error_is_a_part_of_the_count():
    tracked = (Tracked(2, 110, {"loss": 100}), Tracked(4, 210, {"loss": 200}))
    assert Verification(tracked, 6, 330, 300).error == pytest.approx(0.1)


def test_what_needs_other_ranks_values_is_refused():
    with pytest.raises(ConfigError, match=r"--verify: pp=2 and ep=1 need other ranks' values"):
        verify(small(mesh={"pp": 2}, micro_batch_rows=1), 2)
    config = small()
    config.compile.enabled = True
    with pytest.raises(
        ConfigError, match=r"compile.enabled=True hides allocations.*--compile.enabled False"
    ):
        verify(config, 1)
