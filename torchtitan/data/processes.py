"""Work of the data in background processes, whose results come in order."""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from torchtitan import environment
from torchtitan.errors import DataError

T = TypeVar("T")

_OUTLIVED = {signal.SIGINT, signal.SIGTERM}


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def told_of_deaths(remedy: str) -> Iterator[None]:
    """Where results of `in_processes` are taken: a process that died is an error of the data with a remedy.

    Args:
        remedy: what to do, in a message.

    Raises:
        DataError: if one was killed, or ended by itself.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        what = str(error).partition("\n")[0]
        raise DataError(f"a data worker died ({what}); if memory ran out, {remedy}") from error


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
            worker_init_fn=_begin,
            # Drawing the workers' seeds from the global generator would shift the randomness of
            # the run.
            generator=torch.Generator(),
            # Forked workers start at once, share the memory of the row indices, and can run a
            # source that was defined in a recipe file. They touch no CUDA. Elsewhere (macOS) system
            # libraries do not survive a fork.
            multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
        )
        # A signal that comes before a worker can outlive it waits until it can.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(items: Iterator[Any]) -> None:
    """End the processes of `in_processes` now; an iterator of another kind has none.

    Left to the garbage collector, they cannot be told to end and are waited for, 5 s each: where an error's traceback
    holds the iterator, that is how a run would end.
    """
    # The iterator's own way out, which it takes when it is done.
    end = getattr(items, "_shutdown_workers", None)
    if end is not None:
        with suppress(RuntimeError):  # one died meanwhile: torch says so, whatever is being done
            end()


def _unchanged(item: Any) -> Any:
    return item


def _begin(worker: int) -> None:
    """Leave it to the main process to end: it may want another batch before it saves.

    Ctrl-C and the SIGTERM of a launcher reach the whole process group. A second SIGTERM ends the
    worker.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
    environment.keep_tokenizers_to_one_thread(whatever_is_set=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Torch's own way out does not end a worker whose results nobody takes any more, and it may share a lock of the parent's."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ignore_once(signum: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(signum, signal.SIG_DFL)
