import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.chat.packing import best_fit, best_subset, longest_first, pack_all


@pytest.mark.parametrize("way", [best_fit, longest_first, pack_all])
@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_every_sample_is_packed_once_and_no_pack_overflows(way, lengths):
    packs = way(lengths, 20)
    assert sorted(i for group in packs for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= 20 for group in packs)
    smallest = -(-sum(lengths) // 20)
    if way is not longest_first:
        assert len(packs) <= 11 / 9 * max(smallest, sum(n > 10 for n in lengths)) + 4
    assert packs == way(lengths, 20)


def test_the_best_fit_is_taken():
    assert pack_all([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack_all([10, 10], 10) == [[0], [1]]
    assert pack_all([], 10) == []


def test_the_better_of_two_ways_is_taken():
    lengths = [4, 4, 3, 3, 3, 3]
    assert best_fit(lengths, 10) == [[0, 1], [2, 3, 4], [5]]
    assert [sum(lengths[i] for i in pack) for pack in longest_first(lengths, 10)] == [10, 10]
    assert len(pack_all(lengths, 10)) == 2
    long = [9, 9, 6, 5, 5, 4, 1, 1]  # the other way round
    assert len(best_fit(long, 10)) == len(pack_all(long, 10)) == 4


@pytest.mark.parametrize(("median", "sigma"), [(85, 0.7), (190, 0.35), (330, 0.75), (900, 0.8)])
def test_rows_are_99_percent_full(median, sigma):
    """Lengths as in sets of instructions, sums, chats and documents."""
    draw = np.random.default_rng(0).normal(np.log(median), sigma, 6000)
    lengths = [n for n in np.exp(draw).astype(int).tolist() if 8 <= n <= 2048]
    packs = pack_all(lengths, 2048)
    assert sum(lengths) / (len(packs) * 2048) > 0.99
    by_length = pack_all(sorted(lengths), 2048)
    assert sum(lengths) / (len(by_length) * 2048) > 0.99


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
