"""One row of every global batch, packed from whole samples.

Shapes: S tokens in a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.batch import IGNORE_INDEX
from torchtitan.data.chat.packing import best_subset
from torchtitan.data.chat.sample import Pack
from torchtitan.data.source import BadRow
from torchtitan.data.stream import Row, Stream, StreamState

_PLENTY = 2
"""Samples that wait are chosen from while they have this many times the tokens of the room: about half of them are taken,
which leaves the most choices."""


@dataclass(frozen=True, slots=True)
class SamplePacking:
    """How a stream fills its rows.

    Attributes:
        look_ahead: samples held ready, from which those that fill a row best are taken.
        one_per_row: leave the rest of a row empty.
    """

    look_ahead: int
    one_per_row: bool


@dataclass(frozen=True, slots=True)
class _Waiting:
    source: int
    count: int
    pack: Pack


class SampleStream(Stream):
    """Packs samples into rows without cutting any, endlessly.

    A row begins with the sample that waits longest. While there is much room, the next ones follow in their order; the
    last part of a row gets those that fill it best. What stays empty is one more document, of end tokens without labels, so that no sample sees it.

    Its state has besides: ``pending``, ``[source, count]`` of the samples that wait; ``rows`` made so far and
    ``filled``, their tokens without the empty ones.

    Args:
        packing: how rows are filled.
        **stream: as for `Stream`.
    """

    def __init__(self, *, packing: SamplePacking, **stream: Any) -> None:
        self.packing = packing
        super().__init__(**stream)
        state: StreamState = stream["state"]
        self._rows: int = state.get("rows", 0)
        self._filled: int = state.get("filled", 0)
        self._waiting = self._waiting_again(state.get("pending", []))

    def state(self) -> StreamState:
        """The position after the last row."""
        waiting = [[item.source, item.count] for item in self._waiting]
        return {
            **super().state(),
            "pending": waiting,
            "rows": self._rows,
            "filled": self._filled,
        }

    def next_row(self) -> Row:
        """Pack one row, ``(4, S)``.

        Raises:
            DataError: if a source cannot be read, holds nothing to learn, or has a bad row that is not to be skipped.
        """
        row = np.empty((4, self.seq_len), dtype=np.int32)
        tokens, labels, positions, document_ids = row
        place, n_samples = 0, 0
        for pack in self._packs_of_row():
            for sample in pack.samples:
                here = slice(place, place + len(sample))
                tokens[here], labels[here] = sample.tokens, sample.labels()
                positions[here] = np.arange(len(sample))
                document_ids[here] = n_samples
                place = here.stop
                n_samples += 1
        tokens[place:], labels[place:] = self.tokenizer.eos_id, IGNORE_INDEX
        positions[place:] = np.arange(self.seq_len - place)
        document_ids[place:] = n_samples
        self._rows += 1
        self._filled += place
        return row

    def _packs_of_row(self) -> list[Pack]:
        """Which packs the next row has; they wait no more."""
        self._wait_for_more()
        packs = [self._waiting.pop(0).pack]
        if self.packing.one_per_row:
            return packs
        space = self.seq_len - packs[0].n_tokens
        lengths = self._wait_for_more()
        while lengths[0] <= space and sum(lengths) <= _PLENTY * space:
            packs.append(self._waiting.pop(0).pack)
            space -= packs[-1].n_tokens
            lengths = self._wait_for_more()
        chosen = best_subset(lengths, space)
        packs += [self._waiting[number].pack for number in chosen]
        for number in reversed(chosen):
            self._waiting.pop(number)
        return packs

    def _wait_for_more(self) -> list[int]:
        """Take packs until so many wait as shall; the tokens of each."""
        while len(self._waiting) < self.packing.look_ahead:
            part = self._take_next()
            pack: Pack = part.text
            self._tokens[self._source] += pack.n_tokens
            self._waiting.append(_Waiting(self._source, self._taken[self._source] - 1, pack))
        return [item.pack.n_tokens for item in self._waiting]

    def _waiting_again(self, pending: list[list[int]]) -> list[_Waiting]:
        """Read again what was waiting; a source that is read in order gives what lies between, too."""
        found: dict[tuple[int, int], Pack] = {}
        for source, feed in enumerate(self.feeds):
            counts = [count for s, count in pending if s == source]
            for count in range(min(counts, default=self._taken[source]), self._taken[source]):
                try:
                    found[source, count] = feed.take(self.number, count).text
                except BadRow:
                    continue  # it was counted when it was met first
        return [_Waiting(s, count, found[s, count]) for s, count in pending]
