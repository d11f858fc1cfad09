"""Recipes: finding one by module and name without importing it, and building its tree.

A recipe is a public function at the top level of a module, without required parameters, that returns the root
``Config``. A recipe's module imports torch, so a wrong name is answered from the module's source alone.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from torchtitan.config.configurable import Configurable
from torchtitan.config.source_names import SourceNames, read_names
from torchtitan.config.suggest import did_you_mean
from torchtitan.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that exists as far as its module's source tells."""

    module: str
    name: str

    def build(self) -> Configurable.Config:
        """Import the module and call the recipe.

        Raises:
            ConfigError: if the name turns out to be no recipe. What the module or the recipe itself raises is not
                caught: its traceback is the message.
        """
        function = getattr(importlib.import_module(self.module), self.name, None)
        if function is None:
            raise _unknown(self.module, self.name, recipes_in(self.module))
        if not callable(function) or isinstance(function, type):
            raise ConfigError(
                f"--config {self.name}: is no function in {self.module}; name a function that returns the root config"
            )
        _refuse_parameters(self, _required(inspect.signature(function)))
        config = function()
        if not isinstance(config, Configurable.Config):
            raise ConfigError(
                f"--config {self.name}: returned {type(config).__qualname__}; "
                "a recipe returns the root config, such as Trainer.Config(...)"
            )
        return config


def find_recipe(module: str, name: str) -> Recipe:
    """The recipe ``name`` of ``module``, found without importing the module.

    Args:
        module: a dotted name, or the path of a ``.py`` file.
        name: of the function.

    Raises:
        ConfigError: if there is no such module, or no such function; the text says what there is.
    """
    dotted = find_module(module)
    recipe = Recipe(dotted, name)
    names = _source_names(dotted)
    if names is None or name in names.others:
        return recipe  # told only by importing it
    if name not in names.functions or name.startswith("_"):
        raise _unknown(dotted, name, names.recipes())
    _refuse_parameters(recipe, names.functions[name].required)
    return recipe


def recipes_in(module: str) -> dict[str, str]:
    """Name -> first line of the docstring of each recipe in ``module`` (dotted name).

    Reads the source; imports the module only where the source does not tell.
    """
    names = _source_names(module)
    if names is not None:
        return names.recipes()
    members = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
    return {
        name: (inspect.getdoc(function) or "").partition("\n")[0]
        for name, function in members
        if not name.startswith("_") and not _required(inspect.signature(function))
    }


def find_module(module: str) -> str:
    """Dotted name of a module given by dotted name or by the path of its ``.py`` file.

    Raises:
        ConfigError: if there is none; the text says what there is next to it.
    """
    if module.endswith(".py") or "/" in module:
        return _module_of_file(Path(module))
    if _spec(module) is None:
        raise ConfigError(f"--module {module}: no such module; {_near_modules(module)}")
    return module


def modules_under(package: str) -> Iterator[str]:
    """Dotted names of ``package`` and of every module below it."""
    yield package
    for found in _submodules(package):
        yield from modules_under(f"{package}.{found}")


def _module_of_file(file: Path) -> str:
    """Make the module in ``file`` importable under the name that an import of it would use."""
    file = file.resolve()
    if not file.is_file():
        there = [str(p.name) for p in file.parent.glob("*.py")]
        remedy = did_you_mean(file.name, there, kind=f"Python files in {file.parent}")
        raise ConfigError(f"--module {file}: no such file; {remedy}")
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").is_file():
        name, folder = f"{folder.name}.{name}", folder.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    spec = _spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        found = spec.origin if spec else "nothing"
        raise ConfigError(
            f"--module {file}: 'import {name}' finds {found} instead; give the file another name"
        )
    return name


def _spec(module: str) -> ModuleSpec | None:
    """Where ``module`` is; None if there is none. Imports its parents, whose own errors are not caught."""
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # an empty name, or a module without a spec
        return None


def _submodules(package: str | None) -> list[str]:
    """Names of the modules directly in a package; at the top level for None."""
    if package is None:
        return [found.name for found in pkgutil.iter_modules()]
    spec = _spec(package)
    locations = spec.submodule_search_locations if spec else None
    return [found.name for found in pkgutil.iter_modules(locations)] if locations else []


def _near_modules(module: str) -> str:
    """What there is in the place of the first part of ``module`` that does not exist."""
    parent, rest = None, module.split(".")
    while len(rest) > 1 and _spec(".".join(filter(None, [parent, rest[0]]))):
        parent = ".".join(filter(None, [parent, rest.pop(0)]))
    prefix = f"{parent}." if parent else ""
    there = [f"{prefix}{name}" for name in _submodules(parent) if not name.startswith("_")]
    return did_you_mean(prefix + rest[0], there, kind=f"modules in {parent or 'reach'}")


def _source_names(module: str) -> SourceNames | None:
    """Names defined in a module's source; None if only importing it tells."""
    spec = _spec(module)
    if spec is None or spec.origin is None:
        return SourceNames({}, set())  # a folder without __init__.py
    if not spec.origin.endswith(".py"):
        return None
    try:
        return read_names(ast.parse(Path(spec.origin).read_bytes()))
    except SyntaxError:
        return None  # importing it shows the error in its place


def _required(signature: inspect.Signature) -> list[str]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in optional
    ]


def _refuse_parameters(recipe: Recipe, required: list[str]) -> None:
    if required:
        raise ConfigError(
            f"--config {recipe.name}: needs the arguments {', '.join(required)}, so it is no recipe; "
            f"write a function without required parameters in {recipe.module} that calls it"
        )


def _unknown(module: str, name: str, recipes: dict[str, str]) -> ConfigError:
    if elsewhere := _modules_with(name, module.partition(".")[0]):
        return ConfigError(
            f"--config {name}: no such recipe in {module}; set --module {' or '.join(elsewhere)}"
        )
    remedy = did_you_mean(name, recipes, kind="recipes")
    listed = f" The recipes are: {', '.join(recipes)}" if remedy.endswith("?") else ""
    return ConfigError(f"--config {name}: no such recipe in {module}; {remedy}{listed}")


def _modules_with(name: str, package: str) -> list[str]:
    """Modules of a package whose source has the recipe ``name``."""
    found = {module: _source_names(module) for module in modules_under(package)}
    return [module for module, names in found.items() if names and name in names.recipes()]
