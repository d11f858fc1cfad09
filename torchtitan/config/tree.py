"""A config as a tree: its nodes (``Config`` objects), its leaves, and the check of the whole."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torchtitan.config.annotations import field_types, fits, misfit
from torchtitan.config.configurable import ChecksWorld, Configurable, Problem

C = TypeVar("C", bound=Configurable.Config)


@dataclass(frozen=True, slots=True)
class Entry:
    """A field of a node in a tree.

    Attributes:
        path: dotted path from the root.
        owner: the node that has the field.
        name: the field's name.
        annotation: its resolved annotation.
    """

    path: str
    owner: Configurable.Config
    name: str
    annotation: Any

    @property
    def value(self) -> Any:
        """What the field holds."""
        return getattr(self.owner, self.name)

    @property
    def is_leaf(self) -> bool:
        """Whether the value holds no node."""
        return next(nodes_in(self.value), None) is None


def join(*parts: str) -> str:
    """Dotted path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def walk(config: Configurable.Config) -> Iterator[tuple[str, Configurable.Config]]:
    """Every node with its dotted path, parents first; the root's path is ``""``.

    Nodes in lists and tuples are reached by index (``data.sources.0``), in dicts by key.
    """
    return nodes_in(config)


def nodes_in(value: Any, path: str = "") -> Iterator[tuple[str, Configurable.Config]]:
    """Every node in a field's value, which may be a node, a container of nodes, or plain."""
    if isinstance(value, Configurable.Config):
        yield path, value
        for name in field_types(type(value)):
            yield from nodes_in(getattr(value, name), join(path, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from nodes_in(item, join(path, str(index)))
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            yield from nodes_in(item, join(path, str(key)))


def entries(config: Configurable.Config) -> Iterator[Entry]:
    """Every field of every node, in the order of the walk."""
    for path, node in walk(config):
        for name, annotation in field_types(type(node)).items():
            yield Entry(join(path, name), node, name, annotation)


def leaves(config: Configurable.Config) -> Iterator[Entry]:
    """Every field that holds no node: what can be overridden."""
    return (entry for entry in entries(config) if entry.is_leaf)


def clone(config: C) -> C:
    """A copy that shares nothing with ``config``: a node that hung in two places becomes two."""
    return cast("C", _clone(config))


def _clone(value: Any) -> Any:
    if isinstance(value, Configurable.Config):
        names = field_types(type(value))
        return type(value)(**{name: _clone(getattr(value, name)) for name in names})
    if isinstance(value, list | tuple):
        return type(cast("list[Any]", value))(map(_clone, cast("list[Any]", value)))
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def check_tree(root: Configurable.Config, world_size: int) -> list[Problem]:
    """Everything that is wrong with a config, before anything is built from it.

    First each field against its annotation; where all fit, every node's ``check`` with paths from the root, then
    ``root.check_world(world_size)`` if the root has it (rules that need the number of ranks).
    """
    problems = list(_type_problems(root))
    if problems:
        return problems  # the nodes' own rules rely on the types
    for path, node in walk(root):
        problems += (dataclasses.replace(p, path=join(path, p.path)) for p in node.check())
    if isinstance(root, ChecksWorld):
        problems += root.check_world(world_size)
    return problems


def _type_problems(root: Configurable.Config) -> Iterator[Problem]:
    for entry in entries(root):
        if not fits(entry.value, entry.annotation):
            reason = misfit(entry.annotation)
            yield Problem(entry.path, entry.value, reason, "change it in the recipe")
