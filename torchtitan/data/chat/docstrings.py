"""Questions and answers that are on every machine, made from the docstrings of the running Python."""

import ast
import inspect
import platform
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torchtitan.data.source import MapSource, Source
from torchtitan.errors import ConfigError, DataError

_HELD_OUT_ONE_IN = 20
_MAX_ANSWER = 400  # characters


class Docstrings(MapSource):
    """A short conversation about each documented function and class of the standard library's modules.

    The source files are read, never imported. The text differs a little between Python versions.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        """Questions and answers about the running Python."""

        split: Literal["train", "validation"] = "train"
        """Part of the conversations: about 5 % are held out for validation, chosen by a hash of what they are about."""

        def build(self) -> "Docstrings":
            """There is no text without the questions.

            Raises:
                ConfigError: always.
            """
            raise ConfigError(
                "Docstrings has conversations, not text; wrap it in a Chat source, or use Embedded for text"
            )

        def build_rows(self) -> "Docstrings":
            """Find the modules; they are read when the first row is.

            Raises:
                DataError: if the installation has no source files.
            """
            return Docstrings(self)

    def __init__(self, config: Config) -> None:
        self.split = config.split
        root = Path(sysconfig.get_path("stdlib"))
        self._files = sorted(f for f in root.glob("*.py") if not f.name.startswith("_"))
        if not self._files:
            raise DataError(
                f"{root} has no source files to make questions from; mend the installation of Python, or use other data"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        """Row ``index``: its ``messages``."""
        return self._rows[index]

    def place(self, index: int) -> str:
        """What the conversation is about."""
        return f"Docstrings row {index + 1}"

    def describe(self) -> str:
        """Name for messages."""
        return f"Docstrings(split={self.split})"

    def fingerprint(self) -> str:
        """The version of Python and the sizes of the files."""
        sizes = [(file.name, file.stat().st_size) for file in self._files]
        return repr((self.split, platform.python_version(), sizes))

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        held_out = self.split == "validation"
        return [
            {"messages": _conversation(entry)}
            for file in self._files
            for entry in _entries(file)
            if (zlib.crc32(entry.name.encode("utf-8")) % _HELD_OUT_ONE_IN == 0) == held_out
        ]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    module: str
    kind: Literal["function", "class", "method"]
    summary: str
    arguments: str | None


def _entries(file: Path) -> Iterator[_Entry]:
    """The documented public functions, classes and methods of a module."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # whatever an installation lacks is left out
    for node in tree.body:
        yield from _documented(node, file.stem, file.stem)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                yield from _documented(member, f"{file.stem}.{node.name}", file.stem)


def _documented(node: ast.stmt, parent: str, module: str) -> Iterator[_Entry]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
    summary = " ".join(text.split())[:_MAX_ANSWER]
    if node.name.startswith("_") or len(summary) < 12:
        return
    if isinstance(node, ast.ClassDef):
        yield _Entry(f"{parent}.{node.name}", module, "class", summary, None)
        return
    kind = "function" if parent == module else "method"
    yield _Entry(f"{parent}.{node.name}", module, kind, summary, ast.unparse(node.args))


def _conversation(entry: _Entry) -> list[dict[str, str]]:
    turns = [(f"What does the {entry.kind} `{entry.name}` do?", entry.summary)]
    if entry.arguments is not None:
        takes = f"`({entry.arguments})`" if entry.arguments else "None."
        turns.append(("Which arguments does it take?", takes))
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(roles, turn, strict=True)
    ]
