import subprocess
import sys

import pytest

from torchtitan.config import from_dict, to_dict
from torchtitan.config.recipes import find_module, find_recipe, modules_under, recipes_in
from torchtitan.errors import ConfigError

RECIPES = '''
"""Recipes."""
from functools import partial
from tests.unit.config.toy import Root, tree
from tests.unit.config import toy as toys

def small() -> Root.Config:
    """Small run.

    More words.
    """
    return tree()

def with_default(steps: int = 7) -> Root.Config:
    config = tree()
    config.steps = steps
    return config

def needs(size, *, kind):
    return tree()

def no_config():
    return {"steps": 1}

def _private():
    return tree()

assigned = partial(with_default, steps=9)
NUMBER = 3

if NUMBER:
    def conditional():
        return tree()
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package ``shop`` with the recipes in ``shop.models.toys``."""
    models = tmp_path / "shop" / "models"
    models.mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").touch()
    (models / "__init__.py").touch()
    (models / "toys.py").write_text(RECIPES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield models
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def message(module: str, name: str = "small", *, build: bool = False) -> str:
    def attempt() -> None:
        recipe = find_recipe(module, name)
        if build:
            recipe.build()

    with pytest.raises(ConfigError) as caught:
        attempt()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "steps"), [("small", 4), ("with_default", 7), ("assigned", 9), ("conditional", 4)]
)
def test_a_recipe_is_found_and_built(package, name, steps):
    config = find_recipe("shop.models.toys", name).build()
    assert config.steps == steps  # pyright: ignore[reportAttributeAccessIssue] - a toy root


def test_an_imported_recipe_is_one_of_the_module(package):
    assert (
        find_recipe("shop.models.toys", "tree").build()
        == find_recipe("shop.models.toys", "small").build()
    )


def test_recipes_are_listed_with_their_first_line_and_without_import(package):
    assert recipes_in("shop.models.toys") == {
        "small": "Small run.",
        "with_default": "",
        "no_config": "",
        "conditional": "",
    }
    assert list(modules_under("shop")) == ["shop", "shop.models", "shop.models.toys"]
    assert "shop.models.toys" not in sys.modules


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            "shop.models.toy",
            "--module shop.models.toy: no such module; did you mean shop.models.toys?",
        ),
        ("shop.model.toys", "--module shop.model.toys: no such module; did you mean shop.models?"),
        (
            "shop.zzzz",
            "--module shop.zzzz: no such module; the modules in shop are: shop.models",
        ),
        (
            "torchtitan_recipe.models",
            "--module torchtitan_recipe.models: no such module; did you mean torchtitan_recipes",
        ),
        ("shop.models.toys.deeper", "no such module; there are no modules in shop.models.toys"),
        ("", "--module : no such module; "),
        ("shop..models", "--module shop..models: no such module; "),
    ],
)
def test_an_unknown_module_is_answered_with_what_there_is(package, module, expected):
    assert expected in message(module)


@pytest.mark.parametrize(
    ("name", "build", "expected"),
    [
        (
            "smal",
            False,
            "--config smal: no such recipe in shop.models.toys; did you mean small? "
            "The recipes are: small, with_default, no_config, conditional",
        ),
        (
            "zzzz",
            False,
            "--config zzzz: no such recipe in shop.models.toys; "
            "the recipes are: conditional, no_config, small, with_default",
        ),
        ("_private", False, "--config _private: no such recipe in shop.models.toys; "),
        (
            "needs",
            False,
            "--config needs: needs the arguments size, kind, so it is no recipe; "
            "write a function without required parameters in shop.models.toys that calls it",
        ),
        ("NUMBER", True, "--config NUMBER: is no function in shop.models.toys; name a function"),
        ("no_config", True, "--config no_config: returned dict; a recipe returns the root config"),
        ("partial", True, "--config partial: is no function in shop.models.toys"),
    ],
)
def test_an_unknown_recipe_is_answered_with_what_there_is(package, name, build, expected):
    assert expected in message("shop.models.toys", name, build=build)
    assert build or "shop.models.toys" not in sys.modules


def test_a_module_with_star_import_or_getattr_is_imported_to_know(package):
    (package / "star.py").write_text("from shop.models.toys import *\n", encoding="utf-8")
    (package / "lazy.py").write_text(
        "def __getattr__(name):\n"
        "    import shop.models.toys as toys\n"
        "    if name == 'late':\n        return toys.small\n"
        "    raise AttributeError(name)\n",
        encoding="utf-8",
    )
    assert find_recipe("shop.models.star", "small").build()
    assert find_recipe("shop.models.lazy", "late").build()
    assert "did you mean small?" in message("shop.models.star", "smal", build=True)
    assert "no such recipe in shop.models.lazy" in message("shop.models.lazy", "x", build=True)


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ("import no_such_package\n\ndef small(): ...\n", ModuleNotFoundError, "no_such_package"),
        ("from shop.models.toys import gone\n\ndef small(): ...\n", ImportError, "gone"),
        ("def small(:\n", SyntaxError, "invalid syntax"),
        ("1 / 0\n\ndef small(): ...\n", ZeroDivisionError, "division"),
    ],
)
def test_a_broken_module_raises_its_own_error(package, source, error, match):
    (package / "broken.py").write_text(source, encoding="utf-8")
    with pytest.raises(error, match=match):
        find_recipe("shop.models.broken", "small").build()


def test_a_broken_parent_package_raises_its_own_error(package):
    (package / "__init__.py").write_text("import no_such_package\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        find_recipe("shop.models.toys", "small")


@pytest.fixture
def lone_file(tmp_path, monkeypatch):
    """A recipe file outside of any package and of the import path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "lone_recipes.py"
    file.write_text(
        RECIPES.replace("return tree()", "return Root.Config(steps=1, layer=Mine.Config())", 1)
        + "\nclass Mine(toys.Layer):\n"
        "    from dataclasses import dataclass\n"
        "    @dataclass(kw_only=True, slots=True)\n"
        "    class Config(toys.Layer.Config):\n"
        "        mine: int = 3\n",
        encoding="utf-8",
    )
    yield file
    sys.modules.pop("lone_recipes", None)


def test_a_recipe_in_a_file_is_found_and_its_classes_can_be_stored(lone_file):
    config = find_recipe(str(lone_file), "small").build()
    data = to_dict(config)
    assert data["layer"]["type"] == "lone_recipes:Mine.Config"
    assert from_dict(data) == config


def test_a_stored_class_that_cannot_be_imported_is_refused_in_words(lone_file):
    data = to_dict(find_recipe(str(lone_file), "small").build())
    sys.path.remove(str(lone_file.parent))
    del sys.modules["lone_recipes"]
    with pytest.raises(ConfigError, match=r"its module cannot be imported .* on PYTHONPATH"):
        from_dict(data)


def test_a_file_inside_a_package_keeps_its_dotted_name(package):
    assert find_module(str(package / "toys.py")) == "shop.models.toys"


def test_a_missing_file_is_answered_with_what_is_next_to_it(lone_file):
    text = message(str(lone_file.with_name("lone_recipe.py")))
    assert "lone_recipe.py: no such file; did you mean lone_recipes.py?" in text


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "json.py"
    file.write_text(RECIPES, encoding="utf-8")
    assert "'import json' finds " in message(str(file))
    assert message(str(file)).endswith("; give the file another name")


def test_finding_a_wrong_recipe_does_not_import_torch():
    code = (
        "import sys\n"
        "from torchtitan.config.recipes import find_recipe\n"
        "for module, name in [('torchtitan_recipes.models.llama3', 'x'), ('torchtitan_recipes.x', 'x')]:\n"
        "    try:\n        find_recipe(module, name)\n"
        "    except ValueError as error:\n        print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("no such") == 2


def test_a_recipe_of_another_module_of_the_package_is_found(package):
    (package / "more.py").write_text("def large():\n    ...\n", encoding="utf-8")
    text = message("shop.models.toys", "large")
    assert (
        text == "--config large: no such recipe in shop.models.toys; set --module shop.models.more"
    )
