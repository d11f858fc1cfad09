"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The gloo processes of this test run."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: RankPool):
    """`run(fn, world_size, *args, timeout_s=90)`: call a module-level function on gloo ranks."""
    return rank_pool.run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that uses the pool is marked ``ranks``."""
    for item in items:
        if "rank_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
