"""The debug recipe's losses are those that were stored."""

import json

import pytest

from tests.golden.golden import SERIES, STEPS, environment, run


def run_in_a_rank(steps):
    return run(steps), environment()


@pytest.mark.golden
def test_losses_are_the_stored_ones(ranks, record_property):
    stored = json.loads(SERIES.read_text(encoding="utf-8"))
    ((losses, here),) = ranks(run_in_a_rank, 1, STEPS, timeout_s=600)
    if here == stored["environment"]:
        record_property("compared", "all losses, bit for bit")
        print("golden: same environment, all losses compared bit for bit")
        assert losses == stored["losses"]
    else:
        record_property("compared", f"first 20 losses to 1e-4: {here} != {stored['environment']}")
        print(f"golden: {here} is not {stored['environment']}, 20 losses compared to 1e-4")
        assert losses[:20] == pytest.approx(stored["losses"][:20], rel=1e-4)


@pytest.mark.golden
def test_two_runs_are_equal_bit_for_bit(ranks):
    ((first, _),) = ranks(run_in_a_rank, 1, 20)
    ((second, _),) = ranks(run_in_a_rank, 1, 20)
    assert first == second
    assert first[-1] < first[0]
