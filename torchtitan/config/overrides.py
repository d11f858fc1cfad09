"""``--section.field value`` on the command line, set on a recipe's own tree.

One flag at a time, so that every problem on the line is reported and not the first.
"""

import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torchtitan.config.annotations import allows_none, alternatives
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.config.parse import BadValueError, parse_value
from torchtitan.config.show import show_value
from torchtitan.config.suggest import nearest_paths
from torchtitan.config.tree import Entry, clone, entries, leaves

C = TypeVar("C", bound=Configurable.Config)


@dataclass(frozen=True, slots=True)
class Flag:
    """One ``--name`` of a command line with the values that follow it."""

    name: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The values as the user wrote them."""
        return " ".join(self.values)


def split_flags(arguments: Iterable[str]) -> tuple[list[Flag], list[Problem]]:
    """Cut a command line into flags with their values.

    A value that starts with two dashes is written ``--name=--value``; ``-1`` is a value.
    """
    flags: list[Flag] = []
    problems: list[Problem] = []
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            flags.append(Flag(name, (value,) if equals else ()))
        elif flags:
            flags[-1] = Flag(flags[-1].name, (*flags[-1].values, argument))
        else:
            remedy = "write overrides as --section.field value"
            problems.append(Problem("", argument, "belongs to no flag", remedy))
    return flags, problems


def apply_flags(config: C, flags: Iterable[Flag]) -> tuple[C, list[Problem]]:
    """A copy of ``config`` with every flag that can be applied, and what is wrong with the others.

    A later flag wins over an earlier one of the same name. Dashes and underscores in names are the same.
    """
    changed = clone(config)
    problems: list[Problem] = []
    for flag in flags:
        try:
            _apply(changed, flag)
        except BadValueError as error:
            problems.append(Problem(flag.name, flag.text, error.reason, error.remedy))
    return changed, problems


def _apply(root: Configurable.Config, flag: Flag) -> None:
    path = _normal(flag.name)
    for entry in entries(root):
        if _normal(entry.path) == path:
            setattr(entry.owner, entry.name, _new_value(entry, flag))
            return
        if entry.is_leaf and path.startswith(_normal(entry.path) + "."):
            _set_inside(entry, flag.name[len(entry.path) + 1 :], flag)
            return
    raise _unknown(root, flag)


def _normal(name: str) -> str:
    return name.replace("-", "_")


def _new_value(entry: Entry, flag: Flag) -> Any:
    if flag.values == ("None",) and allows_none(entry.annotation):
        return None
    if not entry.is_leaf:
        off = ", or None to turn it off" if allows_none(entry.annotation) else ""
        reason = f"is a section ({show_value(entry.value)}), not a value"
        raise BadValueError(reason, f"set its fields{off}")
    return parse_value(flag.values, entry.annotation, example=entry.value)


def _set_inside(entry: Entry, key: str, flag: Flag) -> None:
    """Set one key of a field that is a dict; other leaves have nothing inside."""
    for member in alternatives(entry.annotation):
        value = entry.value
        if typing.get_origin(member) is dict and isinstance(value, dict):
            items = cast("dict[Any, Any]", value)
            value_type = typing.get_args(member)[1]
            items[key] = parse_value(flag.values, value_type, example=items.get(key))
            return
    if entry.value is None:
        raise BadValueError(f"the section {entry.path} is off (None)", "turn it on in a recipe")
    raise BadValueError(f"{entry.path} is a value, not a section", f"set --{entry.path} itself")


def _unknown(root: Configurable.Config, flag: Flag) -> BadValueError:
    near = nearest_paths(_normal(flag.name), [leaf.path for leaf in leaves(root)])
    if near:
        remedy = f"did you mean {' or '.join(f'--{path}' for path in near)}?"
    else:
        remedy = "--help lists the fields"
    return BadValueError("no such field in this recipe", remedy)
