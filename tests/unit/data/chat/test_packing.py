import time

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.chat.packing import best_fit


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_sample_is_packed_once_and_no_pack_overflows(lengths):
    packs = best_fit(lengths, 20)
    assert sorted(i for group in packs for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= 20 for group in packs)
    smallest = -(-sum(lengths) // 20)
    assert len(packs) <= 11 / 9 * max(smallest, sum(n > 10 for n in lengths)) + 4
    assert packs == best_fit(lengths, 20)


def test_the_best_fit_is_taken():
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([10, 10], 10) == [[0], [1]]
    assert best_fit([], 10) == []


def test_many_samples_take_seconds():
    start = time.process_time()
    lengths = [1 + (i * 7919) % 700 for i in range(30_000)]
    packs = best_fit(lengths, 2048)
    assert sum(lengths) / (len(packs) * 2048) > 0.99
    assert time.process_time() - start < 10
