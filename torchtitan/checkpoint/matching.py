"""Names, shapes and dtypes: do the tensors of a checkpoint fit those of the run?"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

_MAX_HINTS = 50  # looking for near names is quadratic; a list of thousands needs none


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Global shape (of a sharded tensor: of the whole) and dtype name (``float32``)."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def differences(saved: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo]) -> list[str]:
    """One line for each tensor that is missing, unexpected, or of another shape or dtype.

    Args:
        saved: the tensors of the checkpoint, by name.
        wanted: the tensors of this run, by name.
    """
    missing = sorted(wanted.keys() - saved.keys())
    unexpected = sorted(saved.keys() - wanted.keys())
    lines = []
    for index, name in enumerate(missing):
        near = difflib.get_close_matches(name, unexpected, n=1) if index < _MAX_HINTS else []
        hint = f"; the checkpoint has {near[0]}" if near else ""
        lines.append(f"missing from the checkpoint: {name} ({wanted[name]}){hint}")
    lines += [f"not in this run: {name} ({saved[name]})" for name in unexpected]
    for name in sorted(wanted.keys() & saved.keys()):
        if saved[name].shape != wanted[name].shape:
            lines.append(f"wrong shape: {name} is {saved[name]}, this run has {wanted[name]}")
        elif saved[name].dtype != wanted[name].dtype:
            lines.append(f"wrong dtype: {name} is {saved[name]}, this run has {wanted[name]}")
    return lines


def rank_name(rank: int, name: str) -> str:
    """The name under which a tensor of one rank is stored."""
    return f"rank/{rank}/{name}"


def is_rank_name(name: str) -> bool:
    """Whether ``name`` is stored for one rank."""
    return name.startswith("rank/")
