"""What differs between two config trees, and whether it changes what is computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torchtitan.config.annotations import field_types
from torchtitan.config.configurable import Configurable
from torchtitan.config.show import show_value
from torchtitan.config.tree import join, nodes_in


@dataclass(frozen=True, slots=True)
class Difference:
    """One field, or one whole node, that is not the same in two trees.

    Attributes:
        path: dotted path from the root.
        old: value in the first tree; None where that tree has nothing there.
        new: value in the second tree; None where that tree has nothing there.
        changes_mathematics: False if a field on the path is ``OPERATIONAL`` in its owner.
    """

    path: str
    old: Any
    new: Any
    changes_mathematics: bool

    def __str__(self) -> str:
        return f"{self.path}: {show_value(self.old)} -> {show_value(self.new)}"


def differences(old: Configurable.Config, new: Configurable.Config) -> list[Difference]:
    """Every difference, in the order of the tree; a node of another type is one difference."""
    return list(_compare("", old, new, True))


def _compare(path: str, old: Any, new: Any, mathematics: bool) -> Iterator[Difference]:
    if type(old) is not type(new):
        if old != new or isinstance(old, bool) or isinstance(new, bool):
            yield Difference(path, old, new, mathematics)
    elif isinstance(old, Configurable.Config):
        for name in field_types(type(old)):
            counts = mathematics and name not in type(old).OPERATIONAL
            yield from _compare(join(path, name), getattr(old, name), getattr(new, name), counts)
    elif _holds_nodes(old) and _holds_nodes(new):
        before, after = _by_key(old), _by_key(new)
        for key in dict.fromkeys([*before, *after]):
            item = join(path, str(key))
            yield from _compare(item, before.get(key), after.get(key), mathematics)
    elif not _same(old, new):
        yield Difference(path, old, new, mathematics)


def _holds_nodes(value: Any) -> bool:
    return next(nodes_in(value), None) is not None


def _by_key(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value)
    return dict(enumerate(cast("list[Any]", value)))


def _same(old: Any, new: Any) -> bool:
    """Equality for which nan equals itself, as it does for whoever wrote it in a config."""
    return old == new or repr(old) == repr(new)
