"""The safetensors of a folder: what is in them, and any part of any tensor, read lazily."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan.checkpoint.matching import TensorInfo
from torchtitan.errors import CheckpointError
from torchtitan.models.mapping import Box

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that weights can be read from; their names in safetensors and here."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is.

    Attributes:
        info: its shape and type.
        file: name of the file.
    """

    info: TensorInfo
    file: str


class WeightFiles:
    """The weights of a Hugging Face folder; nothing but headers is read until a tensor is asked for.

    Args:
        folder: with ``model.safetensors``, or several files and their index.

    Raises:
        CheckpointError: if there are no safetensors, or the index and the files disagree; lists everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.stored: dict[str, Stored] = {}
        """All tensors, by name."""
        problems: list[str] = []
        indexed = self._indexed()
        for file in sorted(set(indexed.values())) if indexed is not None else [SINGLE]:
            try:
                self._look_into(file, indexed, problems)
            except (OSError, SafetensorError, ValueError) as error:
                problems.append(f"{file} cannot be read: {error}")
        missing = sorted((indexed or {}).keys() - self.stored.keys())
        if not problems:
            problems += [f"{indexed[name]} lacks {name}, which {INDEX} says is there" for name in missing if indexed]  # fmt: skip
        if problems:
            raise CheckpointError(
                f"{folder}: its weights are not whole; download or export it again:\n  "
                + "\n  ".join(problems)
            )

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, in its own type, on the CPU.

        Raises:
            CheckpointError: if the file cannot be read.
        """
        file = self.stored[name].file
        try:
            return self._opened(file).get_slice(name)[box]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / file}: reading {name} failed: {error}"
            ) from error

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt")
        return self._open[file]

    def _look_into(self, file: str, indexed: dict[str, str] | None, problems: list[str]) -> None:
        opened = self._opened(file)
        for name in opened.keys():  # noqa: SIM118 - no mapping
            view = opened.get_slice(name)
            dtype = str(view.get_dtype())
            info = TensorInfo(tuple(view.get_shape()), _DTYPES.get(dtype, dtype))
            if name in self.stored:
                problems.append(f"duplicate: {name} is in {self.stored[name].file} and in {file}")
            elif indexed is not None and indexed.get(name) != file:
                where = f"says {indexed[name]}" if name in indexed else "does not name it"
                problems.append(f"{name} is in {file}, but {INDEX} {where}")
            self.stored[name] = Stored(info, file)

    def _indexed(self) -> dict[str, str] | None:
        """The index's file of each tensor; None where there is one file."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise CheckpointError(no_weights(self.folder))
            return None
        try:
            found = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)[
                "weight_map"
            ]
            outside = [file for file in found.values() if Path(file).name != file]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        if outside:
            raise CheckpointError(f"{index} is refused: it points outside its folder, to {outside[0]}")  # fmt: skip
        return found


def no_weights(folder: Path) -> str:
    """Why a folder has no weights to read, and what to do."""
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} has no weights: neither {SINGLE} nor {INDEX}; name a folder that has one"
    return (
        f"{folder} has weights as pickles only ({', '.join(pickles[:3])}); they are not loaded, because a pickle can run any "
        "program. Take a revision with safetensors (many hub repositories have one named refs/pr/N by the hub's converter), "
        "or convert it where nothing can be harmed: torch.load(file, weights_only=True), then safetensors.torch.save_file"
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(n for n in names if names.count(n) > 1)} twice")
    return found
