"""Reading the annotations of ``Config`` fields: which values a field takes."""

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from torchtitan.config.configurable import Configurable


@functools.cache
def field_types(config_type: type[Configurable.Config]) -> Mapping[str, Any]:
    """Field name -> annotation with names resolved, in the order of the fields."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    return {
        name: hints[name]
        for name in config_type.__dataclass_fields__
        if not _is_classvar(hints[name])
    }


def _is_classvar(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.ClassVar


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, with ``Annotated`` taken off; one member if it is no union."""
    if typing.get_origin(annotation) is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(a for member in typing.get_args(annotation) for a in alternatives(member))
    return (annotation,)


def allows_none(annotation: Any) -> bool:
    """Whether ``None`` is a value of the field."""
    return any(member in (None, type(None), Any) for member in alternatives(annotation))


def allows_node(annotation: Any) -> bool:
    """Whether the field can hold a ``Config``."""
    return any(
        member in (Any, object)
        or (isinstance(member, type) and issubclass(member, Configurable.Config))
        for member in alternatives(annotation)
    )


def describe(annotation: Any) -> str:
    """The annotation as a reader would write it: ``int | None``, ``'a' | 'b'``, ``AdamW.Config``."""
    member, *others = alternatives(annotation)
    if others:
        return " | ".join(describe(each) for each in (member, *others))
    arguments = typing.get_args(member)
    if typing.get_origin(member) is Literal:
        return " | ".join(repr(choice) for choice in arguments)
    if arguments:
        inside = ", ".join("..." if a is Ellipsis else describe(a) for a in arguments)
        return f"{typing.get_origin(member).__name__}[{inside}]"
    if member is type(None):
        return "None"
    return str(getattr(member, "__qualname__", member))


def misfit(annotation: Any) -> str:
    """The reason of a `Problem` whose value is none of the field's."""
    return f"does not fit the field's type, {describe(annotation)}"


def fits(value: Any, annotation: Any) -> bool:
    """Whether ``value`` is one that the field may hold; an ``int`` fits ``float``, a ``bool`` no number."""
    return any(_fits_member(value, member) for member in alternatives(annotation))


def _fits_member(value: Any, member: Any) -> bool:
    if member in (Any, object):
        return True
    if member in (None, type(None)):
        return value is None
    if member in (int, float) and isinstance(value, bool):
        return False
    if member is float:
        return isinstance(value, int | float)
    if member is Path:
        return isinstance(value, Path)
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is None:
        return not isinstance(member, type) or isinstance(value, member)
    return isinstance(value, origin) and _fits_items(value, origin, arguments)


def _fits_items(value: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if origin is tuple:
        items = cast("tuple[Any, ...]", value)
        expected = tuple_items(arguments, len(items))
        return expected is not None and all(map(fits, items, expected))
    if issubclass(origin, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in pairs)
    if issubclass(origin, Sequence):
        return all(fits(item, arguments[0]) for item in cast("Sequence[Any]", value))
    return True


def tuple_items(arguments: tuple[Any, ...], length: int) -> tuple[Any, ...] | None:
    """Annotations of the ``length`` items of a ``tuple[...]``; None if it has another length."""
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return (arguments[0],) * length
    return arguments if len(arguments) == length else None
