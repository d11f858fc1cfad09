"""Work of the data in background processes, whose results come in order."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_processes(dataset: Dataset[T], n_workers: int, prefetch: int) -> Iterator[T]:
    """The items of ``dataset``, made by ``n_workers`` processes.

    Those of a map-style data set come in its order. An iterable one is iterated in each process, and their items come in
    turn.

    Args:
        dataset: sent to each process, or shared with it where processes are forked.
        n_workers: processes.
        prefetch: items that each makes ahead.
    """
    with warnings.catch_warnings():
        # Python >= 3.12 warns of every fork in a process with threads (torch always has some).
        warnings.filterwarnings("ignore", ".*fork", category=DeprecationWarning)
        # More workers than cores is the user's choice: they wait for a disk or a network, perhaps.
        warnings.filterwarnings("ignore", "This DataLoader will create", category=UserWarning)
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=n_workers,
            prefetch_factor=prefetch,
            collate_fn=_unchanged,
            worker_init_fn=_outlive_signals,
            # Drawing the workers' seeds from the global generator would shift the randomness of
            # the run.
            generator=torch.Generator(),
            # Forked workers start at once, share the memory of the row indices, and can run a
            # source that was defined in a recipe file. They touch no CUDA. Elsewhere (macOS) system
            # libraries do not survive a fork.
            multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
        )
        return iter(loader)


def _unchanged(item: Any) -> Any:
    return item


def _outlive_signals(worker: int) -> None:
    """Leave it to the main process to end: it may want another batch before it saves.

    Ctrl-C and the SIGTERM of a launcher reach the whole process group. A second SIGTERM ends the
    worker.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_once)


def _ignore_once(signum: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(signum, signal.SIG_DFL)
