"""Dealing the rows of a source to the streams: row ``j`` of the endless sequence of epochs goes to stream ``j % G``.

Letters: G streams (one for each row of a global batch), N rows in a source.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.data.order import permuted, stable_hash
from torchtitan.data.source import MapSource, SequentialSource
from torchtitan.errors import DataError


@dataclass(frozen=True, slots=True)
class Part:
    """A document, or one of the equal parts that the few documents of a small source are cut into.

    Attributes:
        text: what is to be encoded; a `Pack` from a source of conversations.
        first: whether the document begins with it.
        last: whether the document ends with it.
    """

    text: Any
    first: bool = True
    last: bool = True


class Feed(Protocol):
    """One source, as the streams see it."""

    rows_per_epoch: int | None
    """N times the parts of a document; None where it is not known yet."""
    any_order: bool
    """Whether a stream may ask for any of its rows at any time; else for each of them once, one after the other."""

    def take(self, stream: int, count: int) -> Part:
        """What stream number ``stream`` gets after it has taken ``count`` rows.

        Raises:
            BadRow: if that row has no usable text.
            DataError: if the source cannot be read.
        """
        ...


class MapFeed:
    """Deals a source that is read by index; it has no state of its own.

    With shuffling each epoch has its own permutation; without, epoch ``e`` begins at row ``e``, so
    that no stream meets the same few rows for ever where G is a multiple of N. A source with fewer
    documents than streams has each of them cut into ``ceil(G / N)`` parts: otherwise several
    streams would read the same text at the same time and a batch would be copies of one row.
    Conversations are not cut.
    """

    def __init__(self, source: MapSource, n_streams: int, shuffle_seed: int | None) -> None:
        self.source = source
        self.n_streams = n_streams
        self.shuffle_seed = shuffle_seed
        self.n_parts = -(-n_streams // len(source)) if source.divisible else 1
        self.rows_per_epoch: int | None = len(source) * self.n_parts
        self.any_order = True

    def take(self, stream: int, count: int) -> Part:
        """The part at place ``stream + G * count`` of the sequence of epochs."""
        n = len(self.source) * self.n_parts
        epoch, index = divmod(stream + self.n_streams * count, n)
        if self.shuffle_seed is None:
            index = (index + epoch) % n
        else:
            index = permuted(index, n, stable_hash(self.shuffle_seed, epoch))
        document, part = divmod(index, self.n_parts)
        text = self.source.read(document)
        if self.n_parts == 1:
            return Part(text)
        start, end = (len(text) * p // self.n_parts for p in (part, part + 1))
        return Part(text[start:end], first=part == 0, last=part == self.n_parts - 1)


class SequentialFeed:
    """Deals a source that is read in order: reads on, and queues what belongs to its own streams.

    Every worker of every rank reads the whole source and keeps its share; that is the price of an
    order that does not depend on how many there are.

    Args:
        source: what to read.
        n_streams: G.
        shuffle_seed: None keeps the order of the data.
        wanted: for each own stream, how many rows it has taken; reading starts at the smallest row
            still needed.
        rows_per_epoch: N where it is known from before, else None.
    """

    def __init__(
        self,
        source: SequentialSource,
        n_streams: int,
        shuffle_seed: int | None,
        wanted: Mapping[int, int],
        rows_per_epoch: int | None,
    ) -> None:
        self.source = source
        self.n_streams = n_streams
        self.shuffle_seed = shuffle_seed
        self.rows_per_epoch = rows_per_epoch
        self.any_order = False
        self._wanted = dict(wanted)
        self._queues: dict[int, deque[tuple[int, object]]] = {stream: deque() for stream in wanted}
        # From the row before the first that is needed: that one is known to exist, so that the end
        # of an epoch whose length is not known yet is seen even if nothing follows.
        first = min(stream + n_streams * (count - 1) for stream, count in wanted.items())
        self._rows = self._read_on(max(0, first))

    def take(self, stream: int, count: int) -> Part:
        """The next row of the stream; rows of other streams met on the way are kept for them."""
        queue = self._queues[stream]
        while not queue:
            number, value = next(self._rows)
            owner, taken = number % self.n_streams, number // self.n_streams
            if owner in self._queues and taken >= self._wanted[owner]:
                self._queues[owner].append((number, value))
        number, value = queue.popleft()
        if number != stream + self.n_streams * count:
            raise RuntimeError(
                f"stream {stream} asked for row {count} and the feed is at {number // self.n_streams}"
            )
        row = number % self.rows_per_epoch if self.rows_per_epoch else number
        return Part(self.source.document(value, self.source.place(row)))

    def _read_on(self, start: int) -> Iterator[tuple[int, object]]:
        epoch, skip = divmod(start, self.rows_per_epoch) if self.rows_per_epoch else (0, start)
        number = start
        while True:
            seed = None if self.shuffle_seed is None else stable_hash(self.shuffle_seed, epoch)
            n_rows = skip
            for value in self.source.rows(start=skip, shuffle_seed=seed):
                yield number, value
                number += 1
                n_rows += 1
            expected = self.rows_per_epoch
            if n_rows == skip or (expected is not None and n_rows != expected):
                raise DataError(
                    f"{self.source.describe()}: epoch {epoch} ended after {n_rows} rows, not "
                    f"{'more than ' + str(skip) if expected is None else expected}; the data changed during the run"
                )
            self.rows_per_epoch = n_rows
            epoch, skip = epoch + 1, 0
