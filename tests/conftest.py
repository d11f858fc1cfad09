"""Fixtures for all tests."""

import sys
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


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A group that a test leaves behind would fail another one, far away."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test leaves a process group behind")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that uses the pool is marked ``ranks``."""
    for item in items:
        if "rank_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
