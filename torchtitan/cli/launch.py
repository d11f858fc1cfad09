"""Several ranks: starts them, forwards signals, ends them together and says why they ended."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan.cli.ending import Ending
from torchtitan.cli.ranks import CLOSE_S, RankProcess
from torchtitan.cli.seat import Seat, take_seat
from torchtitan.cli.verdict import verdict
from torchtitan.environment import RankPlace, grace_s, meeting, rank_environment

SETTLE_S = 5.0
"""Seconds that the other ranks get to end by themselves after one failed, so that the first cause is known."""
KILL_S = 5.0
"""Seconds between SIGTERM after a failure, which a rank that hangs cannot obey, and SIGKILL."""
POLL_S = 0.05


def launch(
    argv: Sequence[str], *, ranks_here: int, nnodes: int, log_ranks: frozenset[int] | None
) -> Ending:
    """Run ``python -m torchtitan.train`` with ``argv`` in every rank of this machine, until all have ended.

    Args:
        argv: the arguments of this process.
        ranks_here: ranks on this machine.
        nnodes: machines.
        log_ranks: local ranks whose output is shown; None means all. The text of a failed rank is always part of
            the ending.
    """
    seat = take_seat(nnodes, meeting())
    shown = frozenset(range(ranks_here)) if log_ranks is None else log_ranks
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder, _StopRequests() as stop:
        ranks: list[RankProcess] = []
        try:
            for local_rank in range(ranks_here):
                place = _place(seat, local_rank, ranks_here, nnodes)
                ranks.append(_start(argv, place, Path(folder), shown))
            _supervise(ranks, stop)
        finally:
            for rank in ranks:
                rank.kill_what_is_left()
            seat.close()
        return verdict(ranks, stopped=stop.count > 0)


def _place(seat: Seat, local_rank: int, ranks_here: int, nnodes: int) -> RankPlace:
    return RankPlace(
        rank=seat.node_rank * ranks_here + local_rank,
        local_rank=local_rank,
        world_size=nnodes * ranks_here,
        local_world_size=ranks_here,
        node_rank=seat.node_rank,
        master_address=seat.address,
        master_port=seat.port,
        store_is_served=seat.store_is_served,
    )


def _start(
    argv: Sequence[str], place: RankPlace, folder: Path, shown: frozenset[int]
) -> RankProcess:
    hidden = place.local_rank not in shown
    errors = folder / f"{place.rank}.stderr"
    with contextlib.ExitStack() as files:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan.train", *argv],
            env=rank_environment(place, folder, shown),
            stdout=subprocess.DEVNULL if hidden else None,
            stderr=files.enter_context(errors.open("wb")) if hidden else None,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which forwards it once
        )
    return RankProcess(
        place.rank, process, folder / f"{place.rank}.json", errors if hidden else None
    )


class _StopRequests:
    """Counts SIGTERM, SIGINT and SIGHUP while entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "_StopRequests":
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self.count += 1


def _supervise(ranks: Sequence[RankProcess], stop: _StopRequests) -> None:
    """Wait until every rank has ended; see that they do."""
    forwarded = 0
    failed_at: float | None = None
    kill_at: float | None = None
    for running in _still_running(ranks):
        now = time.monotonic()
        if stop.count > forwarded:
            forwarded = stop.count
            kill_at = kill_at or now + grace_s()
            for rank in running:
                rank.send(signal.SIGTERM)
        if kill_at is not None and now > kill_at:
            for rank in running:
                rank.end(signal.SIGKILL)
        if failed_at is None and any(rank.is_failing() for rank in ranks):
            failed_at = now
        if failed_at is not None:
            _end_after_failure(ranks, running, now - failed_at)


def _end_after_failure(
    ranks: Sequence[RankProcess], running: Sequence[RankProcess], seconds: float
) -> None:
    """End what still runs ``seconds`` after a rank failed; ranks that failed themselves get time to close."""
    waiting = [rank for rank in running if not rank.is_failing()]
    if seconds > SETTLE_S:
        explained = any(rank.has_own_error() for rank in ranks)
        for rank in waiting:
            if rank.ended_by_us:
                continue
            if not explained:
                rank.end(signal.SIGUSR1)  # it writes where it is
            rank.end(signal.SIGTERM)
    if seconds > SETTLE_S + KILL_S:
        for rank in waiting:
            rank.end(signal.SIGKILL)
    if seconds > CLOSE_S + KILL_S:
        for rank in running:
            rank.send(signal.SIGKILL)


def _still_running(ranks: Sequence[RankProcess]) -> Iterator[list[RankProcess]]:
    while running := [rank for rank in ranks if rank.is_running()]:
        yield running
        time.sleep(POLL_S)
