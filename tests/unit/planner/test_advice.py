"""What to change when a run does not fit."""

from tests.unit.planner.cases import small
from torchtitan.planner.advice import advise
from torchtitan.planner.memory import plan_memory
from torchtitan_recipes.models.llama3 import llama3_8b, llama3_70b

GIB = 2**30


def test_nothing_to_change_where_it_fits():
    assert list(advise(small(), 1, 80 * GIB)) == []


def seventy_billion(n_layers=80):
    """FSDP alone, everything kept."""
    config = llama3_70b()
    config.model.n_layers = n_layers
    config.training.global_batch_rows, config.parallelism.tp = 8, 1
    config.activation_checkpointing.mode = "none"
    return config


def test_changes_are_tried_in_order_until_it_fits():
    config = seventy_billion()
    changes = list(advise(config, 8, int(79.1 * GIB)))
    figures = [plan_memory(config, 8).total, *(change.total for change in changes)]
    assert figures == sorted(figures, reverse=True)
    assert [change.fits for change in changes] == [False] * (len(changes) - 1) + [True]
    assert changes[0].flags == "--activation-checkpointing.mode full"
    assert config.activation_checkpointing.mode == "none"  # the run itself is left as it is


def test_figures_are_those_of_the_changed_run():
    config = seventy_billion(n_layers=8)
    first = next(advise(config, 8, 0))
    config.activation_checkpointing.mode = "full"
    assert first.total == plan_memory(config, 8).total


def test_more_ranks_are_the_last_resort():
    *_, last = advise(seventy_billion(), 8, 20 * GIB)
    assert last.flags == ""
    assert last.ranks > 8
    assert last.fits


def test_what_would_be_refused_is_not_proposed():
    config = llama3_8b()  # several micro-batches: no updates in the backward
    config.model.n_layers = 4
    flags = [change.flags for change in advise(config, 8, 0)]
    assert not any("in-backward" in flag for flag in flags)
