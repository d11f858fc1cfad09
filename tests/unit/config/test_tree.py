import typing
from dataclasses import dataclass

import pytest

from tests.unit.config.toy import Layer, Root, Source, WideLayer, tree
from torchtitan.config import Configurable, check_tree, clone, entries, leaves, walk
from torchtitan.config.annotations import describe, fits


def test_walk_reaches_every_node_with_its_path():
    assert [path for path, _ in walk(tree())] == [
        "",
        "layer",
        "sources.0",
        "sources.1",
        "named.books",
        "held_out",
    ]


def test_leaves_are_the_fields_without_nodes_also_those_of_subclasses():
    paths = {leaf.path for leaf in leaves(tree())}
    assert {"layer.stretch", "sources.1.weight", "named.books.path", "other_layer"} <= paths
    assert paths.isdisjoint({"layer", "sources", "named", "held_out"})
    assert {"layer", "sources"} <= {entry.path for entry in entries(tree())}


def test_a_clone_is_equal_and_shares_nothing():
    shared = Layer.Config(width=2)
    config = Root.Config(steps=1, layer=shared, other_layer=shared)
    copy = clone(config)
    assert copy == config
    copy.layer.width = 3
    copy.tags.append("new")
    assert copy.other_layer is not None
    assert copy.other_layer.width == 2
    assert (shared.width, config.tags) == (2, [])


def test_check_tree_collects_the_problems_of_all_nodes_and_of_the_world():
    config = tree()
    config.layer.width = 0
    config.other_layer = Layer.Config(width=-1)
    assert [str(problem) for problem in check_tree(config, world_size=3)] == [
        "layer.width=0: is not positive; set 1 or more",
        "other_layer.width=-1: is not positive; set 1 or more",
        "steps=4: does not divide by 3 ranks; set a multiple of 3",
    ]
    assert check_tree(tree(), world_size=2) == []


def test_check_tree_holds_values_against_annotations_before_any_other_rule():
    config = tree()
    config.layer = typing.cast("Layer.Config", Source.Config(path="no layer"))
    config.betas = typing.cast("tuple[float, float]", (0.9,))
    config.mode = typing.cast("typing.Literal['fast']", "slow")
    assert [str(problem).partition("; ")[0] for problem in check_tree(config, world_size=3)] == [
        f"layer={config.layer!r}: does not fit the field's type, Layer.Config",
        "betas=(0.9,): does not fit the field's type, tuple[float, float]",
        "mode=slow: does not fit the field's type, 'fast' | 'exact'",
    ]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, float, True),
        (True, int, False),
        (True, bool, True),
        (1.0, int, False),
        (None, int | None, True),
        ([1, "a"], list[int], False),
        ({"a": 1}, dict[str, int], True),
        ({1: 1}, dict[str, int], False),
        ((1, 2, 3), tuple[int, ...], True),
        ((1, 2, 3), tuple[int, int], False),
        (WideLayer.Config(), Layer.Config, True),
        (Layer.Config(), WideLayer.Config, False),
        (True, typing.Literal[1], False),
        (object(), typing.Any, True),
        (3, typing.Annotated[int, "unit"], True),
    ],
)
def test_fits(value, annotation, expected):
    assert fits(value, annotation) is expected


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int | None, "int | None"),
        (typing.Literal["a", 1], "'a' | 1"),
        (tuple[int, ...], "tuple[int, ...]"),
        (dict[str, float], "dict[str, float]"),
        (WideLayer.Config, "WideLayer.Config"),
        (typing.Any, "Any"),
    ],
)
def test_describe(annotation, expected):
    assert describe(annotation) == expected


def test_a_misspelt_field_is_an_error_at_once():
    with pytest.raises(AttributeError, match="widht"):
        Layer.Config().widht = 3  # pyright: ignore[reportAttributeAccessIssue] - the point


def test_a_root_without_check_world_is_checked_too():
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        layer: Layer.Config

    assert len(check_tree(Config(layer=Layer.Config(width=0)), world_size=5)) == 1
