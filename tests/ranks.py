"""A pool of gloo processes for tests: started once, a fresh process group for each call.

A process costs seconds to start (it imports torch), a process group milliseconds. So the processes stay for the
whole test run, and only a failure replaces them: a rank that failed leaves the others in a collective.
"""

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import operator
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_RANKS = 8
GRACE_S = 3.0  # for the other ranks to report, once one has failed


class RanksError(AssertionError):
    """A rank failed, died or hung; the text has its traceback."""


@dataclass(frozen=True, slots=True)
class Call:
    """One function call on one rank. The function travels by name: the worker imports its module."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout_s: float
    sys_path: list[str]


@dataclass(frozen=True, slots=True)
class Worker:
    """A process and the pipe to it; its stacks go to a file when it gets SIGUSR1."""

    process: BaseProcess
    pipe: Connection
    stacks: Path


class RankPool:
    """Up to eight processes, started when first needed, replaced after a failure."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        atexit.register(self.close)  # before multiprocessing waits for processes that wait for us

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0
    ) -> list[Any]:
        """Call ``fn(*args)`` on ``world_size`` ranks of a new process group.

        Args:
            fn: a module-level function. Inside it `torch.distributed` is initialised.
            world_size: 1 to 8.
            args: picklable arguments, the same for all ranks.
            timeout_s: of every collective, and of the whole call.

        Returns:
            What ``fn`` returned on each rank, by rank.

        Raises:
            RanksError: if it raised on a rank, or a rank died, or the time is over.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_RANKS} ranks")
        while len(self._workers) < world_size:
            self._workers.append(_start(len(self._workers), Path(self._scratch.name)))
        with tempfile.TemporaryDirectory(dir=self._scratch.name) as folder:
            names, store = (fn.__module__, fn.__qualname__), f"{folder}/store"
            for rank, worker in enumerate(self._workers[:world_size]):
                worker.pipe.send(Call(*names, args, rank, world_size, store, timeout_s, sys.path))
            results, failures = self._collect(world_size, time.monotonic() + timeout_s)
            if failures:
                self.kill()
                lines = [f"rank {rank}: {text}" for rank, text in failures.items()]
                raise RanksError(f"{fn.__qualname__} on {world_size} ranks:\n" + "\n".join(lines))
        return [results[rank] for rank in range(world_size)]

    def kill(self) -> None:
        """End all processes now; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def close(self) -> None:
        """End the pool."""
        self.kill()
        self._scratch.cleanup()

    def _collect(self, world_size: int, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and failures by rank; the ranks that say nothing until the deadline have failed."""
        rank_of = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world_size])}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while rank_of:
            ready = multiprocessing.connection.wait(rank_of, deadline - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                rank = rank_of.pop(pipe)  # pyright: ignore[reportArgumentType] - only Connections go in
                try:
                    ok, value = self._workers[rank].pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._workers[rank].process.join()
                    code = self._workers[rank].process.exitcode
                    ok, value = False, f"the process ended with exit code {code}"
                (results if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in rank_of.values():
            failures[rank] = f"no answer in time; it was at\n{_stacks(self._workers[rank])}"
        return results, failures


def _start(rank: int, scratch: Path) -> Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    stacks = scratch / f"stacks-{rank}"
    process = context.Process(target=_work, args=(there, str(stacks)), name=f"rank-{rank}")
    process.start()
    there.close()
    return Worker(process, here, stacks)


def _stacks(worker: Worker) -> str:
    if worker.process.pid is None or not worker.process.is_alive():
        return "(gone)"
    os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return worker.stacks.read_text(encoding="utf-8") if worker.stacks.exists() else "(unknown)"


def _work(pipe: Connection, stacks: str) -> None:
    """The life of a worker: calls until the pipe closes. It imports torch here, not in the parent."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(stacks, "w", encoding="utf-8") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                call: Call = pipe.recv()
                try:
                    outcome = (True, _call(call))
                except Exception:  # noqa: BLE001 - the parent reports it
                    outcome = (False, traceback.format_exc())
                pipe.send(outcome)


def _call(call: Call) -> Any:
    import torch  # noqa: PLC0415 - only the workers need it, and they start faster side by side
    import torch.distributed as dist  # noqa: PLC0415

    sys.path[:] = call.sys_path
    fn = operator.attrgetter(call.qualname)(importlib.import_module(call.module))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call.store, call.world_size),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.timeout_s),
    )
    try:
        result = fn(*call.args)
        dist.barrier()  # or gloo may abort the slower rank
        return result
    finally:
        dist.destroy_process_group()
        _forget()


def _forget() -> None:
    """Drop what torch keeps of a call: the next one may have an equal mesh, but its groups are others.

    It would otherwise be given the mesh of before, and the groups would stay, each with its threads.
    """
    import torch  # noqa: PLC0415 - see _call

    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415

        debug._clear_sharding_prop_cache()
        for planner in vars(_redistribute).values():
            if hasattr(planner, "cache_clear"):
                planner.cache_clear()
        _redistribute._planner_cache.clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # or the graphs of earlier calls count towards the limit of recompilations
