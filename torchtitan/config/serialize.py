"""A config tree as JSON and back to an equal tree.

Every node is an object with ``"type": "module:Outer.Config"`` and its fields. The rest follows the annotations: a
tuple is a JSON list, an enum its name, a ``Path`` its text, a float that JSON has no number for is
``{"$float": "inf"}``.
"""

import enum
import importlib
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, Literal, cast

from torchtitan.config.annotations import (
    allows_node,
    alternatives,
    field_types,
    fits,
    misfit,
    tuple_items,
)
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.config.suggest import did_you_mean
from torchtitan.config.tree import join
from torchtitan.errors import ConfigError

FLOAT = "$float"
"""Key of the object that stands for inf, -inf and nan, which JSON has no numbers for."""


def type_name(config_type: type) -> str:
    """``module:Outer.Config``, the tag by which a node is found again."""
    return f"{config_type.__module__}:{config_type.__qualname__}"


def to_dict(config: Configurable.Config) -> dict[str, Any]:
    """The tree as plain JSON values.

    Raises:
        TypeError: if a field holds something else than nodes, numbers, text, enums, paths and containers of them.
    """
    fields = {name: _encode(name, getattr(config, name)) for name in field_types(type(config))}
    return {"type": type_name(type(config)), **fields}


def _encode(path: str, value: Any) -> Any:
    if isinstance(value, Configurable.Config):
        return to_dict(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = enumerate(cast("Sequence[Any]", value))
        return [_encode(join(path, str(i)), item) for i, item in items]
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return {str(key): _encode(join(path, str(key)), item) for key, item in pairs}
    raise TypeError(
        f"{path}={value!r} is of type {type(value).__qualname__}, which a config cannot store; "
        "use numbers, text, enums, paths, containers of them, or a Config"
    )


def from_dict(data: Mapping[str, Any]) -> Configurable.Config:
    """The tree that ``to_dict`` wrote.

    Fields that the file lacks take their defaults, so that an older file can be read.

    Raises:
        ConfigError: naming every node whose type is unknown or no ``Config``, every unknown or missing field and
            every value that does not fit its field.
    """
    reader = _Reader()
    config = reader.node("", data)
    if reader.problems or config is None:
        listed = "".join(f"\n  {problem}" for problem in reader.problems)
        raise ConfigError(f"the stored config cannot be read:{listed}")
    return config


class _MismatchError(Exception):
    """A JSON value that is none of its annotation's."""


class _Reader:
    """Restores values by annotation and collects what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def node(self, path: str, data: Mapping[str, Any]) -> Configurable.Config | None:
        config_type = self.config_type(path, data.get("type"))
        if config_type is None:
            return None
        before = len(self.problems)
        types, fields = field_types(config_type), config_type.__dataclass_fields__
        for name in sorted(data.keys() - types.keys() - {"type"}):
            self.problem(
                join(path, name),
                data[name],
                f"{config_type.__qualname__} has no such field",
                did_you_mean(name, types, kind="fields"),
            )
        for name in types:
            if name not in data and _is_required(fields[name]):
                self.problem(join(path, name), None, "is required, but missing", "add it")
        values = {
            name: self.field(join(path, name), data[name], annotation)
            for name, annotation in types.items()
            if name in data
        }
        return config_type(**values) if len(self.problems) == before else None

    def config_type(self, path: str, name: Any) -> type[Configurable.Config] | None:
        tag = join(path, "type")
        if not isinstance(name, str) or ":" not in name:
            self.problem(tag, name, "does not name a type", "write module:Outer.Config")
            return None
        module, _, qualname = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except (ImportError, ValueError, TypeError) as error:
            remedy = "put the folder that holds the module on PYTHONPATH, or run from there"
            self.problem(tag, name, f"its module cannot be imported ({error})", remedy)
            return None
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or not issubclass(found, Configurable.Config):
            what = "does not exist" if found is None else "is no Configurable.Config"
            self.problem(tag, name, what, "only the configs of components can be stored")
            return None
        return found

    def field(self, path: str, data: Any, annotation: Any) -> Any:
        try:
            return self.value(path, data, annotation)
        except _MismatchError:
            self.problem(path, data, misfit(annotation), "correct the value")
            return None

    def value(self, path: str, data: Any, annotation: Any) -> Any:
        if isinstance(data, dict) and "type" in data and allows_node(annotation):
            node = self.node(path, cast("dict[str, Any]", data))
            if node is not None and not fits(node, annotation):
                raise _MismatchError
            return node
        for member in alternatives(annotation):
            try:
                return self.plain(path, data, member)
            except _MismatchError:
                continue
        raise _MismatchError

    def plain(self, path: str, data: Any, member: Any) -> Any:
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if isinstance(data, dict) and FLOAT in data and member in (float, Any):
            return float(cast("dict[str, str]", data)[FLOAT])
        if isinstance(data, list):
            return self.items(path, cast("list[Any]", data), member, origin, arguments)
        if isinstance(data, dict) and origin is dict:
            pairs = cast("dict[str, Any]", data).items()
            return {
                _key(key, arguments[0]): self.value(join(path, key), item, arguments[1])
                for key, item in pairs
            }
        if isinstance(member, type) and isinstance(data, str):
            if issubclass(member, enum.Enum) and data in member.__members__:
                return member[data]
            if issubclass(member, Path):
                return member(data)
        if origin is Literal and isinstance(data, str):
            for choice in arguments:
                if isinstance(choice, enum.Enum) and choice.name == data:
                    return choice
        if fits(data, member):
            return cast("Any", data)
        raise _MismatchError

    def items(
        self, path: str, data: list[Any], member: Any, origin: Any, arguments: tuple[Any, ...]
    ) -> Any:
        if member in (Any, list):
            return data
        if origin is None or not issubclass(origin, Sequence):
            raise _MismatchError
        expected = (
            tuple_items(arguments, len(data)) if origin is tuple else (arguments[0],) * len(data)
        )
        if expected is None:
            raise _MismatchError
        restored = (
            self.value(join(path, str(i)), item, annotation)
            for i, (item, annotation) in enumerate(zip(data, expected, strict=True))
        )
        return tuple(restored) if origin is tuple else list(restored)

    def problem(self, path: str, value: Any, reason: str, remedy: str) -> None:
        self.problems.append(Problem(path, value, reason, remedy))


def _key(key: str, annotation: Any) -> Any:
    """A dict's key from JSON, which only has text."""
    for member in alternatives(annotation):
        if member is str or member is Any:
            return key
        if member is int and key.lstrip("-").isdigit():
            return int(key)
        if isinstance(member, type) and issubclass(member, enum.Enum) and key in member.__members__:
            return member[key]
    raise _MismatchError


def _is_required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING
