import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.helpers import StreamedTexts, Texts
from torchtitan.data.feed import MapFeed, SequentialFeed
from torchtitan.errors import DataError


def texts(n: int) -> list[str]:
    return [f"document {i}" for i in range(n)]


@given(n=st.integers(1, 40), g=st.integers(1, 12), seed=st.none() | st.integers(0, 9))
def test_each_epoch_deals_each_document_exactly_once(n, g, seed):
    feed = MapFeed(Texts(Texts.Config(texts=texts(n))), g, seed)
    dealt = [feed.take(place % g, place // g) for place in range(3 * feed.rows_per_epoch)]
    for epoch in range(3):
        parts = dealt[epoch * feed.rows_per_epoch : (epoch + 1) * feed.rows_per_epoch]
        assert sum(part.first for part in parts) == sum(part.last for part in parts) == n
        assert sum(len(part.text) for part in parts) == sum(map(len, texts(n)))
        if n >= g:
            assert sorted(part.text for part in parts) == sorted(texts(n))


def test_fewer_documents_than_streams_are_cut_into_parts():
    feed = MapFeed(Texts(Texts.Config(texts=["0123456789", "abcdefghij"])), 5, None)
    parts = [feed.take(stream, 0) for stream in range(5)]
    assert [part.text for part in parts] == ["012", "345", "6789", "abc", "def"]
    assert [part.first for part in parts] == [True, False, False, True, False]
    assert [part.last for part in parts] == [False, False, True, False, False]


def test_each_epoch_has_its_own_order_and_a_seed_repeats_it():
    def order(seed: int, epoch: int) -> list[str]:
        feed = MapFeed(Texts(Texts.Config(texts=texts(20))), 4, seed)
        return [feed.take(p % 4, p // 4).text for p in range(epoch * 20, epoch * 20 + 20)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6


def test_without_shuffling_no_stream_meets_the_same_rows_for_ever():
    feed = MapFeed(Texts(Texts.Config(texts=texts(4))), 4, None)
    assert [feed.take(stream, 0).text for stream in range(4)] == texts(4)
    assert {feed.take(2, epoch).text for epoch in range(4)} == set(texts(4))


@given(
    n=st.integers(1, 20),
    g=st.integers(1, 6),
    seed=st.none() | st.integers(0, 9),
    picks=st.lists(st.integers(0, 5), max_size=60),
)
def test_a_sequential_source_is_dealt_the_same_whoever_reads_it(n, g, seed, picks):
    """All streams in one reader, each in its own, and a reader that goes on from where another was."""
    source = StreamedTexts(StreamedTexts.Config(texts=texts(n)))
    together = SequentialFeed(source, g, seed, dict.fromkeys(range(g), 0), None)
    alone = [SequentialFeed(source, g, seed, {stream: 0}, None) for stream in range(g)]
    taken = [0] * g
    for stream in (pick % g for pick in picks):
        part = together.take(stream, taken[stream])
        assert part == alone[stream].take(stream, taken[stream])
        if seed is None:
            assert part.text == texts(n)[(stream + g * taken[stream]) % n]
        taken[stream] += 1
    resumed = SequentialFeed(source, g, seed, dict(enumerate(taken)), together.rows_per_epoch)
    for stream in range(g):
        assert resumed.take(stream, taken[stream]) == together.take(stream, taken[stream])


def test_going_on_skips_to_the_first_row_still_needed():
    source = StreamedTexts(StreamedTexts.Config(texts=texts(100)))
    feed = SequentialFeed(source, 2, None, {0: 45, 1: 44}, None)
    assert feed.take(0, 45).text == "document 90"
    assert feed.take(1, 44).text == "document 89"
    assert source.reads == 4


def test_a_source_that_changes_its_length_is_an_error():
    source = StreamedTexts(StreamedTexts.Config(texts=texts(3)))
    feed = SequentialFeed(source, 1, None, {0: 0}, 5)
    for count in range(3):
        feed.take(0, count)
    expected = r"StreamedTexts: epoch 0 ended after 3 rows, not 5; the data changed"
    with pytest.raises(DataError, match=expected):
        feed.take(0, 3)


@pytest.mark.parametrize("known", [True, False])
def test_each_epoch_of_a_sequential_source_has_its_own_order(known):
    texts = [f"{i}" for i in range(40)]

    def epochs(seed, start=0):
        source = StreamedTexts.Config(texts=texts).build()
        feed = SequentialFeed(source, 1, seed, {0: start}, len(texts) if known else None)
        order = [feed.take(0, count).text for count in range(start, 3 * len(texts))]
        return [order[i : i + len(texts)] for i in range(0, len(order), len(texts))]

    first, second, third = epochs(1)
    assert sorted(first) == sorted(second) == sorted(third) == sorted(texts)
    assert first != second != third != first
    assert epochs(1) == [first, second, third]
    assert epochs(2)[0] != first
    assert epochs(None) == [texts] * 3
    if known:  # else a resumed feed reads from the beginning of its first epoch
        assert epochs(1, start=40) == [second, third]
