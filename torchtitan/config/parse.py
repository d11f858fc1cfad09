"""Reading one field's value from the words of a command line, by the rules of tyro, which also writes the help."""

from collections.abc import Sequence
from typing import Any

import tyro.constructors

from torchtitan.config.annotations import alternatives, misfit
from torchtitan.config.show import show_value
from torchtitan.config.suggest import did_you_mean

_TYRO: Any = tyro.constructors  # its generics are only partly known to a type checker


class BadValueError(Exception):
    """Why words are no value of a field, and what to write instead."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


def parse_value(words: Sequence[str], annotation: Any, *, example: Any) -> Any:
    """The value that ``words`` are.

    Args:
        words: what follows the flag; none means True for a field that takes a bool.
        annotation: type of the field.
        example: a value of the field, shown in the refusal.

    Raises:
        BadValueError: if they are none of the field's.
    """
    spec = _spec(annotation)
    if not words and bool in alternatives(annotation):
        words = ["True"]
    words = [_choice(word, spec.choices) for word in words]
    remedy = f"give {spec.metavar}, such as the recipe's {show_value(example)}"
    if not _takes(spec.nargs, len(words)):
        count = {0: "no value", 1: "one value"}.get(len(words), f"{len(words)} values")
        raise BadValueError(f"got {count}, but takes {spec.metavar}", remedy)
    wrong = [word for word in words if spec.choices and word not in spec.choices]
    if wrong:
        choices = ", ".join(spec.choices)
        remedy = did_you_mean(wrong[0], spec.choices, kind="choices")
        raise BadValueError(f"is not one of {choices}", remedy)
    try:
        return spec.instance_from_str(words)
    except (ValueError, KeyError, TypeError):
        raise BadValueError(misfit(annotation), remedy) from None


def _spec(annotation: Any) -> Any:
    """The annotation as a ``PrimitiveConstructorSpec`` of tyro."""
    info = _TYRO.PrimitiveTypeInfo.make(annotation, set())
    spec = _TYRO.ConstructorRegistry.get_primitive_spec(info)
    if not isinstance(spec, _TYRO.PrimitiveConstructorSpec):
        reason = f"{misfit(annotation)}, which has no form on the command line"
        raise BadValueError(reason, "set it in a recipe")
    return spec


def _takes(nargs: int | tuple[int, ...] | str, count: int) -> bool:
    if isinstance(nargs, tuple):
        return count in nargs
    return nargs in ("*", count)


def _choice(word: str, choices: tuple[str, ...] | None) -> str:
    """The choice that ``word`` is but for upper and lower case (``true``), else ``word``."""
    same = [choice for choice in choices or () if choice.lower() == word.lower()]
    return same[0] if len(same) == 1 else word
