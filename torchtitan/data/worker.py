"""Making pieces of batches, in this process or in background workers.

Letters: n streams of one worker, S tokens in a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.data.bad_rows import MIN_BAD_ROWS, BadRowPolicy
from torchtitan.data.chat.stream import SamplePacking, SampleStream
from torchtitan.data.feed import Feed, MapFeed, SequentialFeed
from torchtitan.data.order import stable_hash
from torchtitan.data.processes import in_processes
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
    return in_processes(_Pieces(plan), n_workers, prefetch)


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
