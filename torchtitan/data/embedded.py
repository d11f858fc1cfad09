"""Text that is on every machine: the documentation topics and the standard library of the running Python."""

import importlib
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan.data.source import BadRow, MapSource, Source
from torchtitan.errors import DataError

_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "pydoc_data",
}
_HELD_OUT_ONE_IN = 50


class Embedded(MapSource):
    """The topics of ``help()`` and the source files of the standard library, split by document.

    The text differs a little between Python versions. Whatever an installation lacks (topics,
    sources) is left out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        """Text of the running Python."""

        split: Literal["train", "validation"] = "train"
        """Part of the documents: about 2 % are held out for validation, chosen by a hash of their name."""

        def build(self) -> "Embedded":
            """List the documents; they are read one by one later."""
            return Embedded(self)

    def __init__(self, config: Config) -> None:
        self.split = config.split
        self._topics = _topics()
        self._root = Path(sysconfig.get_path("stdlib"))
        names = [*(f"topic/{name}" for name in self._topics), *_source_names(self._root)]
        held_out = config.split == "validation"
        self.names = sorted(name for name in names if is_held_out(name) == held_out)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> str:
        """Text of document ``index``, in the order of the names."""
        name = self.names[index]
        kind, _, rest = name.partition("/")
        if kind == "topic":
            return self._topics[rest]
        try:
            return (self._root / rest).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRow("invalid_utf8", name, f"byte {error.start} is not UTF-8") from error
        except OSError as error:
            raise DataError(
                f"{self._root / rest}: cannot be read ({error.strerror}); mend the installation of Python"
            ) from error

    def describe(self) -> str:
        """Name and size for messages."""
        return f"Embedded(split={self.split}): {len(self.names)} documents"


def is_held_out(name: str) -> bool:
    """Whether the document of this name belongs to the validation split."""
    return zlib.crc32(name.encode("utf-8")) % _HELD_OUT_ONE_IN == 0


def _topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}


def _source_names(root: Path) -> list[str]:
    names = []
    for folder, subfolders, files in os.walk(root):  # nothing to walk is an empty list
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        prefix = Path(folder).relative_to(root)
        names += [f"stdlib/{(prefix / name).as_posix()}" for name in files if name.endswith(".py")]
    return names
