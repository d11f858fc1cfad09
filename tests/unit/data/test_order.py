from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.data.order import permuted, shuffled, stable_hash


@given(n=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_every_index_goes_to_its_own_place(n, key):
    assert sorted(permuted(i, n, key) for i in range(n)) == list(range(n))


def test_a_large_range_needs_no_memory():
    places = [permuted(i, 10**12, 7) for i in range(1000)]
    assert len(set(places)) == 1000
    assert all(0 <= place < 10**12 for place in places)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_keys_reach_every_place_about_equally_often(n):
    n_keys = 4000
    seen = Counter(
        (i, permuted(i, n, stable_hash("key", k))) for k in range(n_keys) for i in range(n)
    )
    assert len(seen) == n * n
    expected = n_keys / n
    assert max(abs(count - expected) for count in seen.values()) < 6 * expected**0.5


def test_the_hash_is_the_same_on_every_machine():
    assert stable_hash(1, "a") == 4923302134452111476


@given(n=st.integers(0, 60), ahead=st.integers(1, 70), seed=st.integers(0, 10))
def test_shuffling_a_stream_loses_nothing_and_looks_only_so_far_ahead(n, ahead, seed):
    order = list(shuffled(range(n), ahead, seed))
    assert sorted(order) == list(range(n))
    assert all(row < place + ahead for place, row in enumerate(order))
    assert order == list(shuffled(iter(range(n)), ahead, seed))


def test_the_order_of_a_stream_is_the_same_in_every_version():
    """A run that is resumed with newer packages must not see another order."""
    assert list(shuffled(range(12), 4, 7)) == [1, 0, 2, 5, 6, 4, 7, 8, 10, 9, 3, 11]
    assert list(shuffled(range(12), 4, 8)) != list(shuffled(range(12), 4, 7))
