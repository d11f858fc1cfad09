"""Making pieces of batches, in this process or in background workers.

Letters: n streams of one worker, S tokens in a row.
"""

import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan.data.bad_rows import MIN_BAD_ROWS, BadRowPolicy
from torchtitan.data.chat.stream import SamplePacking, SampleStream
from torchtitan.data.feed import Feed, MapFeed, SequentialFeed
from torchtitan.data.order import stable_hash
from torchtitan.data.source import BadRow, MapSource, SequentialSource
from torchtitan.data.stream import Stream, StreamState, rows_wanted
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError


@dataclass(frozen=True, slots=True)
class Piece:
    """What a worker makes for one step.

    Attributes:
        rows: ``(n, 4, S)`` int32.
        states: the position of each of the worker's streams after these rows.
        rows_per_epoch: for each source, where it is known.
        bad_rows: texts of the first bad rows that this worker met since its last piece.
        error: why there are no rows, if there are none. Errors of the data travel as values: an
            exception would arrive wrapped in the worker's traceback.
    """

    rows: np.ndarray[tuple[int, int, int], np.dtype[np.int32]]
    states: dict[int, StreamState]
    rows_per_epoch: list[int | None]
    bad_rows: list[str]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker needs to know.

    Attributes:
        sources: opened sources.
        weights: one for each source.
        tokenizer: encodes the documents.
        seq_len: S.
        n_streams: rows of the global batch.
        shuffle_seed: decides the order; None keeps that of the data.
        policy: what to do with bad rows.
        states: this rank's streams and where they go on.
        rows_per_epoch: for each source, where it is known.
        packing: how rows are filled with whole samples; None where documents go on from row to row.
    """

    sources: Sequence[MapSource | SequentialSource]
    weights: Sequence[float]
    tokenizer: Tokenizer
    seq_len: int
    n_streams: int
    shuffle_seed: int | None
    policy: BadRowPolicy
    states: dict[int, StreamState]
    rows_per_epoch: Sequence[int | None]
    packing: SamplePacking | None = None


def make_pieces(plan: Plan, worker: int = 0, n_workers: int = 1) -> Iterator[Piece]:
    """Pieces of the steps' batches, endlessly, for the worker's contiguous share of the plan's streams."""
    numbers = sorted(plan.states)
    first, end = (len(numbers) * w // n_workers for w in (worker, worker + 1))
    numbers = numbers[first:end]
    notes: list[str] = []
    n_noted = 0

    def note(row: BadRow) -> None:
        nonlocal n_noted
        n_noted += 1
        if n_noted <= MIN_BAD_ROWS:
            notes.append(str(row))

    try:
        feeds = [_feed(plan, source, numbers) for source in range(len(plan.sources))]
        streams = [
            _stream(
                plan.packing,
                number=number,
                n_streams=plan.n_streams,
                feeds=feeds,
                weights=plan.weights,
                tokenizer=plan.tokenizer,
                seq_len=plan.seq_len,
                policy=plan.policy,
                on_bad_row=note,
                state=plan.states[number],
            )
            for number in numbers
        ]
        while True:
            rows = np.stack([stream.next_row() for stream in streams])
            states = {stream.number: stream.state() for stream in streams}
            yield Piece(rows, states, [feed.rows_per_epoch for feed in feeds], notes.copy())
            notes.clear()
    except DataError as error:
        nothing = np.empty((0, 4, plan.seq_len), dtype=np.int32)
        yield Piece(nothing, {}, [], notes, error=str(error))


def start_workers(plan: Plan, n_workers: int, prefetch: int) -> Iterator[Piece]:
    """Make pieces in ``n_workers`` processes; they come out in the order of the workers, step by step."""
    with warnings.catch_warnings():
        # Python >= 3.12 warns of every fork in a process with threads (torch always has some).
        warnings.filterwarnings("ignore", ".*fork", category=DeprecationWarning)
        # More workers than cores is the user's choice: they wait for a disk or a network, perhaps.
        warnings.filterwarnings("ignore", "This DataLoader will create", category=UserWarning)
        loader = DataLoader(
            _Pieces(plan),
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


class _Pieces(IterableDataset[Piece]):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[Piece]:
        info = get_worker_info()
        if info is None:
            return make_pieces(self.plan)
        return make_pieces(self.plan, info.id, info.num_workers)


def _stream(packing: SamplePacking | None, **stream: Any) -> Stream:
    return Stream(**stream) if packing is None else SampleStream(packing=packing, **stream)


def _feed(plan: Plan, index: int, numbers: Sequence[int]) -> Feed:
    source = plan.sources[index]
    seed = None if plan.shuffle_seed is None else stable_hash(plan.shuffle_seed, index)
    if isinstance(source, MapSource):
        return MapFeed(source, plan.n_streams, seed)
    wanted = {number: rows_wanted(plan.states[number])[index] for number in numbers}
    return SequentialFeed(source, plan.n_streams, seed, wanted, plan.rows_per_epoch[index])


def _unchanged(piece: Any) -> Any:
    return piece


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
