"""Every recipe resolves, passes its checks at some world size, and builds on the meta device."""

import importlib

import pytest
import torch

from torchtitan.config import check_tree, from_dict, to_dict
from torchtitan.config.recipes import modules_under, recipes_in
from torchtitan.trainer import Trainer


def recipes():
    for module in modules_under("torchtitan_recipes"):
        for name in recipes_in(module):
            yield pytest.param(module, name, id=name)


def build(module, name):
    config = getattr(importlib.import_module(module), name)()
    assert isinstance(config, Trainer.Config)
    config.folder = "outputs/test"
    return config


@pytest.mark.parametrize(("module", "name"), list(recipes()))
def test_recipe_checks_and_builds_on_meta(module, name):
    config = build(module, name)
    worlds = [world for world in (1, 8, 64, 512) if check_tree(config, world) == []]
    assert worlds, [str(problem) for problem in check_tree(config, 8)]
    with torch.device("meta"):
        model = config.model.build()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.flops_per_token(config.training.seq_len) > 6 * model.parameter_counts().matmul


@pytest.mark.parametrize(("module", "name"), list(recipes()))
def test_recipe_is_documented_and_survives_json(module, name):
    function = getattr(importlib.import_module(module), name)
    assert function.__doc__
    config = build(module, name)
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("name", ["debugmodel", "1b", "3b", "8b", "70b", "405b"])
def test_every_size_of_llama3_has_a_recipe(name):
    assert f"llama3_{name}" in {param.values[1] for param in recipes()}
