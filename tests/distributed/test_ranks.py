"""The pool that all multi-process tests stand on."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksError


def _sum_of_ranks(factor: int) -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return factor * total.item() + dist.get_rank()


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _pid() -> int:
    return os.getpid()


def test_results_come_back_by_rank_and_processes_are_kept(ranks):
    assert ranks(_sum_of_ranks, 2, 10) == [10.0, 11.0]
    assert ranks(_sum_of_ranks, 3, 10) == [30.0, 31.0, 32.0]
    assert ranks(_pid, 2) == ranks(_pid, 2)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (_fail_on_rank_1, "rank 1: Traceback.*ValueError: broken on purpose"),
        (_hang_on_rank_1, "rank 1: no answer in time.*_hang_on_rank_1"),
        (_die_on_rank_1, "rank 1: the process ended with exit code -9"),
    ],
)
def test_a_failure_names_the_rank_and_leaves_a_usable_pool(ranks, fn, text):
    ranks(_pid, 2)  # the processes exist, so the time below is that of the call
    begin = time.monotonic()
    with pytest.raises(RanksError, match=f"(?s){text}"):
        ranks(fn, 2, timeout_s=4)
    assert time.monotonic() - begin < 12
    assert ranks(_sum_of_ranks, 2, 1) == [1.0, 2.0]


def test_too_many_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match="world_size=9: the pool has 1 to 8 ranks"):
        ranks(_pid, 9)
