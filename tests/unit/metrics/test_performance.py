from dataclasses import replace

import pytest

from tests.unit.metrics.runs import RUN
from torchtitan.metrics.performance import Performance, peak_memory_gib


def run(**settings):
    numbers = {
        "total_steps": 100,
        "tokens_per_step_global": 1000,
        "flops_per_token": 6e9,
        "world_size": 4,
    }
    return replace(RUN, **numbers | settings)


class Clock:
    now_s = 50.0

    def __call__(self):
        return self.now_s


def test_numbers_of_a_window():
    clock = Clock()
    performance = Performance(run(), 1.0, clock)
    for _ in range(10):
        clock.now_s += 2.0
        performance.step_done(data_wait_s=0.5)
    numbers = performance.close_window(10)
    assert numbers.pop("peak_memory_gib") > 0.01
    assert numbers == {
        "window_steps": 10,
        "seconds_per_step": 2.0,
        "tokens_per_second": 500.0,
        "tflops_per_device": 6e9 * 500.0 / 4 / 1e12,
        "mfu": 6e9 * 500.0 / 4 / 1e12 / 1.0,
        "data_wait_fraction": 0.25,
        "eta_s": 180.0,
    }


def test_windows_do_not_share_anything():
    clock = Clock()
    performance = Performance(run(), None, clock)
    performance.step_done(1.0)
    clock.now_s += 1.0
    performance.close_window(1)
    performance.step_done(0.0)
    clock.now_s += 4.0
    numbers = performance.close_window(2)
    assert numbers["window_steps"] == 1
    assert numbers["seconds_per_step"] == 4.0
    assert numbers["data_wait_fraction"] == 0.0


def test_eta_leaves_the_slow_first_window_out():
    clock = Clock()
    performance = Performance(run(start_step=40), None, clock)
    performance.step_done(0.0)
    clock.now_s += 30.0
    assert performance.close_window(41)["eta_s"] == 59 * 30.0
    for step, seconds in ((50, 9.0), (60, 21.0)):
        for _ in range(10):
            performance.step_done(0.0)
        clock.now_s += seconds
        last = performance.close_window(step)
    assert last["eta_s"] == pytest.approx(40 * 30.0 / 19)


def test_eta_is_zero_at_and_after_the_end():
    clock = Clock()
    performance = Performance(run(total_steps=1), None, clock)
    performance.step_done(0.0)
    clock.now_s += 1.0
    assert performance.close_window(1)["eta_s"] == 0.0


def test_mfu_is_absent_when_the_peak_is_unknown():
    clock = Clock()
    performance = Performance(run(), None, clock)
    performance.step_done(0.0)
    clock.now_s += 1.0
    assert "mfu" not in performance.close_window(1)


def test_peak_memory_sees_an_allocation():
    before = peak_memory_gib("cpu")
    block = bytearray(b"x") * (
        int(before * 2**30) + 64 * 2**20
    )  # more than ever before, and touched
    after = peak_memory_gib("cpu")
    assert after > before
    assert after > len(block) / 2**30


def test_what_was_before_the_first_step_is_in_no_window():
    clock = Clock()
    performance = Performance(run(), None, clock)
    clock.now_s += 30.0
    performance.begin()
    clock.now_s += 2.0
    performance.step_done(0.0)
    numbers = performance.close_window(1)
    assert (numbers["seconds_per_step"], numbers["eta_s"]) == (2.0, 198.0)
