"""A config tree as text that fits a screen."""

import enum
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, cast

from torchtitan.config.annotations import field_types
from torchtitan.config.configurable import Configurable
from torchtitan.config.tree import join, nodes_in

INDENT = "  "


def show_value(value: Any) -> str:
    """A value in a few characters: a node is its component's name."""
    if isinstance(value, Configurable.Config):
        return type(value).__qualname__.removesuffix(".Config")
    if isinstance(value, enum.Enum):
        return value.name
    return repr(str(value) if isinstance(value, Path) else value)


def format_tree(config: Configurable.Config, changed: Container[str] = ()) -> str:
    """The tree, one field a line, indented by depth.

    Args:
        config: the root.
        changed: paths to mark with ``*`` (what differs from the recipe).
    """
    rows = list(_rows(config, "", 0))
    width = max(len(label) for _, label, _ in rows)
    lines = (
        f"{'*' if path in changed else ' '} {label:<{width}}  {value}".rstrip()
        for path, label, value in rows
    )
    return "\n".join(lines)


def _rows(node: Configurable.Config, path: str, depth: int) -> Iterator[tuple[str, str, str]]:
    for name in field_types(type(node)):
        yield from _value_rows(getattr(node, name), join(path, name), name, depth)


def _value_rows(value: Any, path: str, name: str, depth: int) -> Iterator[tuple[str, str, str]]:
    label = INDENT * depth + name
    if isinstance(value, Configurable.Config):
        yield path, label, show_value(value)
        yield from _rows(value, path, depth + 1)
    elif next(nodes_in(value), None) is None:
        yield path, label, show_value(value)
    else:
        yield path, label, ""
        pairs = (
            cast("dict[Any, Any]", value).items() if isinstance(value, dict) else enumerate(value)
        )
        for key, item in pairs:
            yield from _value_rows(item, join(path, str(key)), str(key), depth + 1)
