import math

import pytest

from torchtitan.optim.schedule import Schedule


def factors(steps, **fields):
    schedule = Schedule.Config(**fields).build(steps)
    return [schedule.factor(t) for t in range(steps)]


def test_table():
    got = factors(10, warmup_steps=4, decay_steps=4, min_factor=0.2)
    assert got == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt"])
def test_first_step_moves_last_step_has_the_minimum_and_stays(decay):
    schedule = Schedule.Config(warmup_steps=3, decay=decay, min_factor=0.1).build(20)
    assert schedule.factor(0) == pytest.approx(1 / 3)
    assert schedule.factor(2) == 1.0
    assert schedule.factor(19) == pytest.approx(0.1)
    assert schedule.factor(500) == pytest.approx(0.1)
    fall = [schedule.factor(t) for t in range(2, 20)]
    assert fall == sorted(fall, reverse=True)


def test_shapes_of_the_fall():
    at = {d: factors(8, decay=d)[3] for d in ("linear", "cosine", "sqrt")}
    assert at == pytest.approx({"linear": 0.5, "cosine": 0.5, "sqrt": 1 - math.sqrt(0.5)})


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("decay", [0, 5])
def test_zeros_are_legal(warmup, decay):
    got = factors(10, warmup_steps=warmup, decay_steps=decay, min_factor=0.5)
    assert got[0] == (0.2 if warmup else 1.0)
    assert got[-1] == (0.5 if decay else 1.0)


def test_own_length_makes_it_independent_of_the_runs():
    config = Schedule.Config(warmup_steps=2, steps=10)
    assert [config.build(5).factor(t) for t in range(12)] == [
        config.build(500).factor(t) for t in range(12)
    ]


@pytest.mark.parametrize(("fraction", "steps", "warmup"), [(0.03, 100, 3), (0.03, 101, 4), (0.03, 5, 1), (0.0, 5, 0), (1.0, 5, 5)])  # fmt: skip
def test_the_rise_as_a_share_of_the_whole(fraction, steps, warmup):
    shared = Schedule.Config(warmup_fraction=fraction, decay="cosine")
    counted = Schedule.Config(warmup_steps=warmup, decay="cosine")
    assert [shared.build(steps).factor(t) for t in range(steps)] == [
        counted.build(steps).factor(t) for t in range(steps)
    ]


def test_problems():
    assert [str(p) for p in Schedule.Config(warmup_fraction=1.5, warmup_steps=2).check()] == [
        "warmup_fraction=1.5: is not in [0, 1]; set such as 0.03",
        "warmup_fraction=1.5: and warmup_steps=2 both say how long the rise is; set warmup_fraction=None or warmup_steps=0",
    ]
    (problem,) = Schedule.Config(warmup_fraction=0.5, decay_steps=6).check_lengths(10)
    assert str(problem).startswith("warmup_steps=5: plus decay_steps=6 is more than the schedule's")
    assert list(Schedule.Config(warmup_steps=500).check_lengths(None)) == []
    (problem,) = Schedule.Config(warmup_steps=8, decay_steps=4).check_lengths(10)
    assert problem.reason == "plus decay_steps=4 is more than the schedule's 10 steps"
    paths = [p.path for p in Schedule.Config(warmup_steps=-1, min_factor=2.0).check()]
    assert paths == ["warmup_steps", "min_factor"]
