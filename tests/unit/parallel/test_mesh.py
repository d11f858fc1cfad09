import pytest

from torchtitan.config import check_tree
from torchtitan.parallel.degrees import Degrees, nearest_fitting
from torchtitan.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("fields", "world", "expected"),
    [
        ({}, 8, Degrees(dp_shard=8)),
        ({"dp_replicate": 2}, 8, Degrees(dp_replicate=2, dp_shard=4)),
        ({"dp_replicate": -1, "dp_shard": 2}, 8, Degrees(dp_replicate=4, dp_shard=2)),
        (
            {"tp": 2, "pp": 2, "cp": 2},
            16,
            Degrees(pp=2, cp=2, tp=2, dp_shard=2, sequence_shards=2),
        ),
        ({"tp": 8, "sequence_parallel": False}, 8, Degrees(tp=8)),
        ({"ep": 4}, 8, Degrees(dp_shard=8, ep=4)),
        ({}, 1, Degrees()),
    ],
)
def test_degrees_are_inferred(fields, world, expected):
    config = Mesh.Config(**fields)
    assert config.resolve(world) == expected
    assert check_tree(config, world) == []


def text(config, world):
    (problem,) = check_tree(config, world)
    return str(problem)


def test_a_product_that_is_not_the_world_size_shows_the_equation_and_what_fits():
    assert text(Mesh.Config(dp_replicate=2, dp_shard=3), 8) == (
        "dp_shard=3: makes dp_replicate=2 * dp_shard=3 = 6 ranks, but the world size is 8; "
        "set dp_replicate=2 * dp_shard=4; or dp_replicate=2 * dp_shard=2 * cp=2; or "
        "dp_replicate=4 * dp_shard=2 (dp_shard=-1 infers it)"
    )


def test_nearest_meshes_change_few_axes():
    found = list(nearest_fitting(Degrees(tp=3, dp_shard=2), 8))
    assert found[0] == Degrees(tp=4, dp_shard=2)
    assert all(d.world == 8 for d in found)


def test_experts_borrow_ranks():
    assert text(Mesh.Config(ep=3), 8) == (
        "ep=3: does not divide the 8 ranks of dp_shard=8 * cp=1 * tp=1 that it borrows; "
        "choose one of [1, 2, 4, 8]"
    )


def test_degrees_that_are_none():
    assert "is not a degree; set 1 or more, or -1 to infer it" in text(Mesh.Config(dp_shard=0), 2)
    assert "is not a degree; set 1 or more" in text(Mesh.Config(tp=-1), 2)
    assert "cannot both be inferred" in text(Mesh.Config(dp_replicate=-1), 2)
    assert "is not positive" in text(Mesh.Config(timeout_s=0), 1)
