"""Orders of work: complete, free of deadlocks, and as idle as the formulas say."""

import pytest

from torchtitan.errors import ConfigError
from torchtitan.parallel.pipeline_schedule import (
    SPLITS_BACKWARD,
    Action,
    bubble,
    draw,
    make_order,
    simulate,
)

SCHEDULES = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 1),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_stage_runs_every_micro_batch_once(schedule, stages_per_rank, pp):
    order = make_order(schedule, pp, stages_per_rank, 8)
    simulate(order)
    actions = [action for line in order for action in line]
    assert len(actions) == len(set(actions))
    for stage in range(pp * stages_per_rank):
        for microbatch in range(8):
            kinds = {a.kind for a in actions if (a.stage, a.microbatch) == (stage, microbatch)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("n", [16, 32])
def test_idle_time_is_that_of_the_formulas(pp, n):
    for schedule, v in SCHEDULES:
        halves = 3 * v if schedule in SPLITS_BACKWARD else v
        idle = bubble(simulate(make_order(schedule, pp, v, n)))
        assert idle == pytest.approx((pp - 1) / (halves * n + pp - 1)), schedule


@pytest.mark.parametrize("pp", [2, 4])
def test_micro_batches_held_are_those_of_the_page(pp):
    expected = {"GPipe": 16, "LoopedBFS": 16, "DualPipeV": pp + 0.5}
    expected["Interleaved1F1B"] = pp + (pp - 1) / 2
    for schedule, v in SCHEDULES:
        held = most = 0
        for action in make_order(schedule, pp, v, 16)[0]:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        assert most / v == expected.get(schedule, pp), schedule


def test_a_deadlock_names_who_waits():
    order = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "B", 0), Action(1, "F", 0)]]
    with pytest.raises(ConfigError, match="deadlocks: rank 0 at 0B0, rank 1 at 1B0, each waiting"):
        simulate(order)


def test_drawing():
    lines = draw(simulate(make_order("GPipe", 2, 1, 2))).split("\n")
    assert lines[0] == "rank 0 | 0F0 0F1 .   .   .   0B0 --  0B1 --"
    assert lines[1] == "rank 1 | .   1F0 1F1 1B0 --  1B1 --  .   ."
