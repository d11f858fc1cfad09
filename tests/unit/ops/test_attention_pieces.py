"""Every pair that may attend is in exactly one piece, and each query of a piece sees a key of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.ops.attention_pieces import Span, decode, encode, pieces


def runs(starts, seq):
    firsts = [i for i in range(seq) if i == 0 or i in starts]
    return list(zip(firsts, [*firsts[1:], seq], strict=True))


@settings(deadline=None, max_examples=150)
@given(
    starts=st.lists(st.sets(st.integers(1, 23), max_size=5), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 2, 5, 9, 100]),
    causal=st.booleans(),
    size=st.sampled_from([2, 3, 4, 6, 12, 24]),
    tile=st.sampled_from([1, 3, 512]),
)
def test_each_pair_once(starts, window, causal, size, tile):
    seq = 24
    documents = [runs(s, seq) for s in starts]
    # held backwards, so that a place in the row is not an index into the tensor
    chunks = [Span(c * size, (c + 1) * size, seq - (c + 1) * size) for c in range(seq // size)]
    seen = torch.zeros(len(documents), seq, seq, dtype=torch.int64)
    for q_span in chunks:
        found = pieces(documents, [q_span], chunks, causal=causal, window=window, tile=tile)
        assert decode(encode([found, [], found]), 3) == [found, [], found]
        for piece in found:
            block = seen[piece.rows, piece.q, piece.k]
            n_queries, n_keys = block.shape[1:]
            assert n_queries
            assert n_keys
            assert piece.q.start >= q_span.at
            assert piece.q.stop <= q_span.at + size
            ones = torch.ones(n_queries, n_keys, dtype=torch.bool)
            sees = piece.band.dense(n_queries, n_keys, ones.device) if piece.band else ones
            assert sees.any(dim=1).all()
            if window is not None and piece.band is not None:
                assert n_queries <= max(tile, window)
            block += sees
    at = torch.arange(seq).view(-1, size).flip(0).flatten()  # index in the tensor of each place
    seen = seen[:, at][:, :, at]
    for row, documents_of_row in enumerate(documents):
        for q in range(seq):
            (document,) = [range(a, b) for a, b in documents_of_row if a <= q < b]
            for k in range(seq):
                near = window is None or abs(q - k) < window
                want = k in document and near and (k <= q or not causal)
                assert seen[row, q, k] == want, (row, q, k)


def test_rows_that_are_alike_share_their_pieces_and_nothing_is_masked():
    whole = [[(0, 8)]] * 3
    found = pieces(whole, [Span(4, 8, 0)], [Span(0, 8, 0)], causal=True, window=None)
    assert [(p.rows, p.q, p.k) for p in found] == [
        (slice(None), slice(0, 4), slice(0, 4)),
        (slice(None), slice(0, 4), slice(4, 8)),
    ]
    assert found[0].band is None
    assert pieces(whole, [Span(0, 4, 0)], [Span(4, 8, 0)], causal=True, window=None) == []


@pytest.mark.parametrize("window", [3, 100])
def test_masks_are_tiles(window):
    long = 100_000
    found = pieces(
        [[(0, long)]], [Span(0, long, 0)], [Span(0, long, 0)], causal=True, window=window
    )
    assert len(found) == -(-long // 512)
    assert max(p.k.stop - p.k.start for p in found) == 512 + window - 1
