"""One row of every global batch: mixes the sources, encodes their documents and packs them.

Shapes: S tokens in a row. A row is an int32 array ``(4, S)`` of tokens, labels, positions and
document ids, in this order.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchtitan.data.bad_rows import DOCUMENTS, EMPTY, BadRowPolicy
from torchtitan.data.document import Document
from torchtitan.data.feed import Feed, Part
from torchtitan.data.source import BadRow
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError

Row = np.ndarray[tuple[int, int], np.dtype[np.int32]]
FIELDS = ("tokens", "labels", "positions", "document_ids")
_MAX_ROWS_WITHOUT_TEXT = 10_000

StreamState = dict[str, Any]
"""What a stream has done, JSON-able and independent of the tokens themselves:

- ``taken``: rows taken, for each source.
- ``tokens``: tokens packed, for each source; they decide which source is next.
- ``open``: ``[source, slice, offset]`` in the document in progress (the last taken of its source),
  or None.
- ``counts``: documents, empty, dropped and bad rows so far.

A stream of samples has more; see `SampleStream`.
"""


def new_state(n_sources: int) -> StreamState:
    """The state of a stream that has done nothing."""
    return {"taken": [0] * n_sources, "tokens": [0] * n_sources, "open": None, "counts": {}}


def rows_wanted(state: StreamState) -> list[int]:
    """For each source, how many rows a stream that goes on from ``state`` has no more need of."""
    wanted = list(state["taken"])
    if state["open"] is not None:
        wanted[state["open"][0]] -= 1
    for source, count, *_ in state.get("pending", []):
        wanted[source] = min(wanted[source], count)
    return wanted


def unreadable_now(row: BadRow) -> DataError:
    """The error of a row that a checkpoint needs again."""
    return DataError(
        f"{row}; the row was readable when the checkpoint was written: restore the data"
    )


class Stream:
    """Packs documents into rows, endlessly.

    The next document comes from the source with the fewest tokens for its weight, so that the
    weights are shares of the tokens. Documents follow each other without gaps; one that does not
    fit goes on in the next row.

    Args:
        number: which of the global batch's rows this is.
        n_streams: how many rows it has.
        feeds: the sources.
        weights: one for each source.
        tokenizer: encodes the documents.
        seq_len: S.
        policy: what to do with bad rows.
        on_bad_row: told of each bad row that is skipped.
        state: where to go on.
    """

    def __init__(
        self,
        *,
        number: int,
        n_streams: int,
        feeds: Sequence[Feed],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        seq_len: int,
        policy: BadRowPolicy,
        on_bad_row: Callable[[BadRow], None],
        state: StreamState,
    ) -> None:
        self.number = number
        self.n_streams = n_streams
        self.feeds = feeds
        self.weights = weights
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.policy = policy
        self.on_bad_row = on_bad_row
        self._taken: list[int] = list(state["taken"])
        self._tokens: list[int] = list(state["tokens"])
        self._counts: Counter[str] = Counter(state["counts"])
        self._source = 0
        self._document: Document | None = None
        if state["open"] is not None:
            self._reopen(*state["open"])

    def state(self) -> StreamState:
        """The position after the last row."""
        document = self._document
        return {
            "taken": list(self._taken),
            "tokens": list(self._tokens),
            "open": [self._source, *document.place] if document else None,
            "counts": dict(self._counts),
        }

    def next_row(self) -> Row:
        """Pack one row, ``(4, S)``.

        Raises:
            DataError: if a source cannot be read, holds no text, or has a bad row that is not to be
            skipped.
        """
        row = np.empty((4, self.seq_len), dtype=np.int32)
        tokens, labels, positions, document_ids = row
        filled, n_documents = 0, 0
        while filled < self.seq_len:
            document = self._document or self._open_next()
            taken, following = document.take(self.seq_len - filled)
            here = slice(filled, filled + len(taken))
            tokens[here], labels[here] = taken, following
            positions[here] = np.arange(len(taken))
            document_ids[here] = n_documents
            self._tokens[self._source] += len(taken)
            self._document = None if document.finished else document
            filled = here.stop
            n_documents += 1
        return row

    def _open_next(self) -> Document:
        return Document(self._take_next(), self.tokenizer)

    def _take_next(self) -> Part:
        """Take rows until one has text; ``_source`` is then where it is from."""
        for _ in range(_MAX_ROWS_WITHOUT_TEXT):
            source = self._next_source()
            count = self._taken[source]
            self._taken[source] += 1
            try:
                part = self.feeds[source].take(self.number, count)
            except BadRow as row:
                self.policy.meet(row, self._counts)
                if row.fault:
                    self.on_bad_row(row)
                continue
            if isinstance(part.text, str) and not part.text.strip():
                self._counts[EMPTY] += 1
                continue
            self._counts[DOCUMENTS] += 1
            self._source = source
            return part
        raise DataError(
            f"{_MAX_ROWS_WITHOUT_TEXT} rows one after the other hold no text ({dict(self._counts)} so far); "
            "mend the data or remove the source"
        )

    def _next_source(self) -> int:
        """The source with the fewest tokens for its weight; at first, the streams share the sources by weight."""
        if not any(self._tokens):
            ends = np.cumsum(self.weights) / sum(self.weights)
            return int(np.searchsorted(ends, (self.number + 0.5) / self.n_streams))
        return min(range(len(self.feeds)), key=lambda s: self._tokens[s] / self.weights[s])

    def _reopen(self, source: int, slice_number: int, offset: int) -> None:
        """Read the document in progress again."""
        try:
            part = self.feeds[source].take(self.number, self._taken[source] - 1)
        except BadRow as row:
            raise unreadable_now(row) from row
        self._source = source
        self._document = Document(part, self.tokenizer, (slice_number, offset))
