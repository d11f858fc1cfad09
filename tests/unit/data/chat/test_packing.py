import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.chat.packing import best_fit, best_subset


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


def test_many_samples():
    lengths = [1 + (i * 7919) % 700 for i in range(30_000)]
    packs = best_fit(lengths, 2048)
    assert sum(lengths) / (len(packs) * 2048) > 0.99


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 30), max_size=9), space=st.integers(0, 60))
def test_no_other_subset_fills_the_room_better(lengths, space):
    chosen = best_subset(lengths, space)
    assert chosen == sorted(set(chosen))
    n_tokens = sum(lengths[i] for i in chosen)
    subsets = itertools.product((0, 1), repeat=len(lengths))
    sums = (sum(n for n, take in zip(lengths, subset, strict=True) if take) for subset in subsets)
    assert n_tokens == max(total for total in sums if total <= space)


def test_of_several_best_subsets_the_earlier_samples_are_taken():
    assert best_subset([3, 5, 3, 2], 8) == [0, 1]
    assert best_subset([9, 4, 4, 4], 8) == [1, 2]
    assert best_subset([9], 8) == best_subset([], 8) == best_subset([4], 0) == []
