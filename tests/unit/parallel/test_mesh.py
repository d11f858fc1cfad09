import pytest

from torchtitan.config import check_tree
from torchtitan.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "expected"),
    [
        (1, -1, 8, (1, 8)),
        (2, -1, 8, (2, 4)),
        (-1, 2, 8, (4, 2)),
        (4, 2, 8, (4, 2)),
        (1, -1, 1, (1, 1)),
    ],
)
def test_degrees_are_inferred(replicate, shard, world, expected):
    config = Mesh.Config(dp_replicate=replicate, dp_shard=shard)
    assert config.resolve(world) == expected
    assert check_tree(config, world) == []


def text(config, world):
    (problem,) = check_tree(config, world)
    return str(problem)


def test_a_product_that_is_not_the_world_size_shows_the_equation_and_what_fits():
    assert text(Mesh.Config(dp_replicate=2, dp_shard=3), 8) == (
        "dp_shard=3: * dp_replicate=2 = 6 ranks, but the world size is 8; "
        "set dp_shard=-1 to infer it, or (dp_replicate, dp_shard) to one of "
        "[(1, 8), (2, 4), (4, 2), (8, 1)]"
    )


def test_a_degree_that_does_not_divide():
    assert "does not divide the 8 ranks; choose one of [1, 2, 4, 8]" in text(
        Mesh.Config(dp_replicate=3), 8
    )


def test_degrees_that_are_none():
    assert "is not a degree" in text(Mesh.Config(dp_shard=0), 2)
    assert "cannot both be inferred" in text(Mesh.Config(dp_replicate=-1), 2)
    assert "is not positive" in text(Mesh.Config(timeout_s=0), 1)
