import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.config.toy import Color, Layer, Root, Source, tree
from torchtitan.config import Configurable, from_dict, to_dict
from torchtitan.errors import ConfigError


def through_json(config: Configurable.Config) -> Configurable.Config:
    return from_dict(json.loads(json.dumps(to_dict(config), allow_nan=False)))


def test_a_tree_comes_back_equal():
    assert through_json(tree()) == tree()


def test_every_node_carries_its_type():
    data = to_dict(tree())
    assert data["type"] == "tests.unit.config.toy:Root.Config"
    assert data["layer"]["type"] == "tests.unit.config.toy:WideLayer.Config"


@settings(deadline=None, max_examples=50)
@given(
    lr=st.floats(allow_nan=False),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    lengths=st.lists(st.integers()).map(tuple),
    tags=st.lists(st.text()),
    keywords=st.dictionaries(
        st.text(),
        st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    ),
    by_layer=st.dictionaries(st.integers(), st.floats(allow_nan=False)),
    color=st.sampled_from(Color),
    limit=st.none() | st.integers(),
    cache=st.sampled_from([Path("a/b"), Path("/c")]),
)
def test_every_kind_of_value_comes_back_exactly(**values: Any):
    config = Root.Config(steps=1, layer=Layer.Config(), **values)
    back = through_json(config)
    assert back == config
    assert repr(back) == repr(
        config
    )  # also the types: a tuple stays a tuple, 1.0 does not become 1


def test_nan_comes_back():
    config = through_json(Root.Config(steps=1, layer=Layer.Config(), lr=math.nan))
    assert isinstance(config, Root.Config)
    assert math.isnan(config.lr)


def test_a_field_that_an_older_file_lacks_takes_its_default():
    data = to_dict(tree())
    del data["betas"], data["sources"][0]["weight"]
    assert from_dict(data) == tree()


def test_all_that_is_wrong_with_a_file_is_listed():
    data = to_dict(tree())
    data["lrr"] = 1
    del data["steps"]
    data["layer"]["type"] = "os:path"
    data["held_out"]["type"] = "no.such.module:X"
    data["other_layer"] = {"type": 3}
    data["named"]["books"] = to_dict(Layer.Config())
    data["sources"][0]["weight"] = "heavy"
    data["betas"] = [1]
    data["mode"] = "slow"
    data["by_layer"] = {"first": 1.0}
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        "the stored config cannot be read:",
        "lrr=1: Root.Config has no such field; did you mean lr?",
        "steps=None: is required, but missing; add it",
        "layer.type=os:path: is no Configurable.Config; only the configs of components can be stored",
        "other_layer.type=3: does not name a type; write module:Outer.Config",
        "sources.0.weight=heavy: does not fit the field's type, float; correct the value",
        f"named={data['named']!r}: does not fit the field's type, dict[str, Source.Config]; correct the value",
        "held_out.type=no.such.module:X: its module cannot be imported (No module named 'no'); "
        "put the folder that holds the module on PYTHONPATH, or run from there",
        "betas=[1]: does not fit the field's type, tuple[float, float]; correct the value",
        "by_layer={'first': 1.0}: does not fit the field's type, dict[int, float]; correct the value",
        "mode=slow: does not fit the field's type, 'fast' | 'exact'; correct the value",
    ]


@pytest.mark.parametrize("name", ["", ":x", "x", "tests.unit.config.toy:Nothing", "builtins:dict"])
def test_a_type_that_is_no_config_is_refused(name):
    with pytest.raises(ConfigError, match=r"type=.*(does not name|cannot be|not exist|is no Conf)"):
        from_dict({"type": name})


def test_what_cannot_be_stored_is_refused():
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        inner: Any

    message = r"inner\.0=<object .*> is of type object, which a config cannot store; use numbers"
    with pytest.raises(TypeError, match=message):
        to_dict(Config(inner=[object()]))


def test_a_node_in_a_union_keeps_its_class():
    config = Root.Config(
        steps=1, layer=Layer.Config(), other_layer=Layer.Config(), held_out=Source.Config(path="x")
    )
    assert through_json(config) == config
