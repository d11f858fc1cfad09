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
from torchtitan.data.stream import Row, Stream, StreamState, unreadable_now
from torchtitan.errors import DataError

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
    n_tokens: int
    pack: Pack | None
    """None is read when it is chosen."""


class SampleStream(Stream):
    """Packs samples into rows without cutting any, endlessly.

    A row begins with the sample that waits longest. While there is much room, the next ones follow in their order; the
    last part of a row gets those that fill it best. What stays empty is one more document, of end tokens without labels, so that no sample sees it.

    Its state has besides: ``pending``, ``[source, count, tokens]`` of the samples that wait, so that they need not be
    encoded before they can be chosen from; ``seq_len``; ``rows`` made so far and ``filled``, their tokens without the empty ones.

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
        # With another seq_len others may be too long, or cut elsewhere.
        known = state.get("seq_len") == self.seq_len
        self._waiting = self._waiting_again(state.get("pending", []), known)

    def state(self) -> StreamState:
        """The position after the last row."""
        waiting = [[item.source, item.count, item.n_tokens] for item in self._waiting]
        return {
            **super().state(),
            "pending": waiting,
            "seq_len": self.seq_len,
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
        packs = [self._pack(self._waiting.pop(0))]
        if self.packing.one_per_row:
            return packs
        space = self.seq_len - packs[0].n_tokens
        lengths = self._wait_for_more()
        while lengths[0] <= space and sum(lengths) <= _PLENTY * space:
            packs.append(self._pack(self._waiting.pop(0)))
            space -= packs[-1].n_tokens
            lengths = self._wait_for_more()
        chosen = best_subset(lengths, space)
        packs += [self._pack(self._waiting[number]) for number in chosen]
        for number in reversed(chosen):
            self._waiting.pop(number)
        return packs

    def _wait_for_more(self) -> list[int]:
        """Take packs until so many wait as shall; the tokens of each."""
        while len(self._waiting) < self.packing.look_ahead:
            part = self._take_next()
            pack: Pack = part.text
            self._tokens[self._source] += pack.n_tokens
            count = self._taken[self._source] - 1
            self._waiting.append(_Waiting(self._source, count, pack.n_tokens, pack))
        return [item.n_tokens for item in self._waiting]

    def _pack(self, item: _Waiting) -> Pack:
        """The pack of a sample that was chosen."""
        if item.pack is not None:
            return item.pack
        try:
            pack: Pack = self.feeds[item.source].take(self.number, item.count).text
        except BadRow as row:
            raise unreadable_now(row) from row
        if pack.n_tokens != item.n_tokens:
            raise DataError(
                f"source {item.source}, row {item.count} of stream {self.number}: it has {pack.n_tokens} tokens, and had "
                f"{item.n_tokens} when the checkpoint was written; restore the data, the tokenizer and the chat template"
            )
        return pack

    def _waiting_again(self, pending: list[list[int]], known: bool) -> list[_Waiting]:
        """What was waiting, to be read when it is chosen; now where its tokens are not known, or cannot be read later."""
        waiting: dict[tuple[int, int], _Waiting] = {}
        for source, feed in enumerate(self.feeds):
            lengths = {count: length for s, count, *length in pending if s == source}
            if known and feed.any_order:
                for count, (n_tokens,) in lengths.items():
                    waiting[source, count] = _Waiting(source, count, n_tokens, None)
                continue
            # one that is read in order gives what lies between, too
            for count in range(min(lengths, default=self._taken[source]), self._taken[source]):
                try:
                    pack: Pack = feed.take(self.number, count).text
                except BadRow as row:
                    # With another seq_len; others were counted when they were met.
                    if count in lengths:
                        self.policy.meet(row, self._counts)
                    continue
                waiting[source, count] = _Waiting(source, count, pack.n_tokens, pack)
        return [waiting[s, count] for s, count, *_ in pending if (s, count) in waiting]
