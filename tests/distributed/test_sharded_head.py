"""The fused operations of the head, with the vocabulary divided over ranks."""

import random

import pytest
import torch.distributed as dist

from tests.heads import check_equal


def many(cases):
    for seed in range(cases):
        check_equal(random.Random(seed), dist.get_rank(), dist.get_world_size())
    return True


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_divided_vocabulary_gives_what_the_dense_computation_gives(ranks, world_size):
    assert all(ranks(many, world_size, 12))
