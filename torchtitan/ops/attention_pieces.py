"""Attention cut into pieces that need no mask, or only a small one: which queries meet which keys.

Documents are runs along a row, so a block of queries and a block of keys meet in one rectangle or triangle a
document. What causality, documents and the window make empty has no piece at all.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.ops.attention_block import Band

TILE = 512
"""Queries of a piece where a window cuts: it has at most TILE + window keys, so its mask is small."""
_DIAGONAL = Band(0, causal=True, window=None)


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a row, and where a tensor holds them.

    Attributes:
        start: place of the first in the row.
        stop: place after the last.
        at: index of the first in the tensor.
    """

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that meet keys, as indices into the tensors that hold them.

    Attributes:
        rows: of the batch.
        q: queries.
        k: keys.
        band: which of the keys a query sees; None for all.
    """

    rows: slice
    q: slice
    k: slice
    band: Band | None


def pieces(
    documents: Sequence[Sequence[tuple[int, int]]],
    q_spans: Iterable[Span],
    k_spans: Iterable[Span],
    *,
    causal: bool,
    window: int | None,
    tile: int = TILE,
) -> list[Piece]:
    """All pieces of some queries and some keys. Each pair that may attend is in exactly one of them.

    Args:
        documents: for each row the (start, stop) of its documents, in order.
        q_spans: tokens whose queries are held.
        k_spans: tokens whose keys are held.
        causal: keys later than the query are not seen.
        window: a query sees keys less than this many tokens away; None for all.
        tile: see `TILE`.
    """
    spans = [(q, k) for q in q_spans for k in k_spans]
    rows_of: dict[tuple[range, range, Band | None], list[int]] = defaultdict(list)
    for row, runs in enumerate(documents):
        for q_span, k_span in spans:
            for start, stop in runs:
                q = range(max(q_span.start, start), min(q_span.stop, stop))
                k = range(max(k_span.start, start), min(k_span.stop, stop))
                for q_part, k_part, band in _cut(q, k, causal, window, tile):
                    key = (_held(q_part, q_span), _held(k_part, k_span), band)
                    rows_of[key].append(row)
    found = []
    for (q, k, band), rows in rows_of.items():
        queries, keys = slice(q.start, q.stop), slice(k.start, k.stop)
        together = len(rows) == len(documents)
        groups = [slice(None)] if together else [slice(r, r + 1) for r in rows]
        found += [Piece(rows, queries, keys, band) for rows in groups]
    return found


def encode(plan: Sequence[Sequence[Piece]]) -> Tensor:
    """The pieces of each source as numbers, ``(n_pieces, 11)`` int64 on the CPU: what an operator can be passed."""
    numbers = [
        (
            source,
            *(-1 if end is None else end for end in (piece.rows.start, piece.rows.stop)),
            *(piece.q.start, piece.q.stop, piece.k.start, piece.k.stop),
            *_encode_band(piece.band),
        )
        for source, found in enumerate(plan)
        for piece in found
    ]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, 11)


def decode(numbers: Tensor, n_sources: int) -> list[list[Piece]]:
    """The inverse of `encode`."""
    plan: list[list[Piece]] = [[] for _ in range(n_sources)]
    for source, row, row_stop, q, q_stop, k, k_stop, *band in numbers.tolist():
        rows = slice(None) if row == -1 else slice(row, row_stop)
        plan[source].append(Piece(rows, slice(q, q_stop), slice(k, k_stop), _decode_band(band)))
    return plan


def _encode_band(band: Band | None) -> tuple[int, int, int, int]:
    if band is None:
        return 0, 0, 0, 0
    return 1, band.offset, int(band.causal), band.window or 0


def _decode_band(numbers: list[int]) -> Band | None:
    there, offset, causal, window = numbers
    return Band(offset, bool(causal), window or None) if there else None


def _held(part: range, span: Span) -> range:
    shift = span.at - span.start
    return range(part.start + shift, part.stop + shift)


def _cut(
    q: range, k: range, causal: bool, window: int | None, tile: int
) -> Iterator[tuple[range, range, Band | None]]:
    """Pieces of queries and keys of one document; in each, every query sees at least one key."""
    if causal:
        k = range(k.start, min(k.stop, q.stop))
        q = range(max(q.start, k.start), q.stop)
    if window is not None:
        q = range(max(q.start, k.start - window + 1), min(q.stop, k.stop + window - 1))
        k = range(max(k.start, q.start - window + 1), min(k.stop, q.stop + window - 1))
    if not q or not k:
        return
    farthest = max(q[-1] - k[0], 0 if causal else k[-1] - q[0])
    if window is None or farthest < window:
        yield from _cut_causal(q, k) if causal else [(q, k, None)]
        return
    for start in range(q.start, q.stop, tile):
        q_tile = range(start, min(start + tile, q.stop))
        last = q_tile[-1] if causal else q_tile[-1] + window - 1
        k_tile = range(max(k.start, start - window + 1), min(k.stop, last + 1))
        band = Band(start - k_tile.start, causal, window)
        yield q_tile, k_tile, band


def _cut_causal(q: range, k: range) -> Iterator[tuple[range, range, Band | None]]:
    """The keys before all queries, the triangle, and the queries after all keys."""
    before = range(k.start, min(k.stop, q.start))
    if before:
        yield q, before, None
    beside = range(max(k.start, q.start), k.stop)
    if not beside:
        return
    yield beside, beside, _DIAGONAL
    after = range(beside.stop, q.stop)
    if after:
        yield after, beside, None
