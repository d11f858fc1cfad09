import math
from typing import cast

from tests.unit.config.toy import Layer, Source, tree
from torchtitan.config import clone, differences, format_tree


def test_equal_trees_do_not_differ():
    assert differences(tree(), tree()) == []


def test_each_difference_has_path_values_and_whether_it_changes_the_mathematics():
    new = clone(tree())
    new.lr = 1e-4
    new.layer = Layer.Config()
    new.sources[0].workers = 3
    new.sources.append(Source.Config(path="e"))
    new.named = {}
    new.folder = "elsewhere"
    cast("Source.Config", new.held_out).path = "f"
    new.keywords["group"] = "y"
    found = {d.path: d for d in differences(tree(), new)}
    assert {path: d.changes_mathematics for path, d in found.items()} == {
        "layer": True,
        "sources.0.workers": False,
        "sources.2": True,
        "named": True,
        "held_out.path": False,  # operational as a whole, whatever is inside
        "lr": True,
        "keywords": True,
        "folder": False,
    }
    assert str(found["lr"]) == "lr: 0.001 -> 0.0001"
    assert str(found["layer"]) == "layer: WideLayer -> Layer"
    assert str(found["sources.2"]) == "sources.2: None -> Source"


def test_a_node_turned_off_is_one_difference():
    new = clone(tree())
    new.held_out = None
    assert [str(d) for d in differences(tree(), new)] == ["held_out: Source -> None"]


def test_nan_equals_itself_and_true_is_not_one():
    old, new = tree(), tree()
    old.lr = new.lr = math.nan
    assert differences(old, new) == []
    old.keywords, new.keywords = {"a": 1.0}, {"a": 1}
    assert differences(old, new) == []
    old.limit, new.limit = True, 1
    assert [str(d) for d in differences(old, new)] == ["limit: True -> 1"]


def test_format_tree_is_one_field_a_line_with_marks():
    lines = format_tree(tree(), changed={"sources.1.weight"}).splitlines()
    assert "  layer        WideLayer" in lines
    assert "    stretch    1.5" in lines
    assert "  color        RED" in lines
    assert "  cache        'cache'" in lines
    assert [line for line in lines if line.startswith("*")] == ["*     weight   0.5"]
