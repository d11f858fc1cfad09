"""The rows of one file."""

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan.data.source import BadRow, text_of

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are read.

    Attributes:
        text_field: name of the field or column that holds the text; None means the whole row.
        cache_folder: where plain copies are kept; None is the default.
    """

    text_field: str | None
    cache_folder: str | None


class Rows(Protocol):
    """The rows of one file; a class, so that it can be sent to a worker."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Text of row ``index``, or the whole row; raises BadRow."""
        ...

    def place(self, index: int) -> str:
        """Where row ``index`` is, for messages."""
        ...


class Spans:
    """Rows that are spans of bytes in a file; 20 bytes of memory each.

    Args:
        path: the file that has the bytes.
        shown: the file that the user knows, for messages.
        parse: from the bytes and the place of a row to the value of its text field; raises BadRow,
            or UnicodeDecodeError for bytes that are not UTF-8.
        whole: whether ``parse`` gives the whole row instead.
    """

    def __init__(
        self, path: Path, shown: Path, parse: Callable[[bytes, str], object], *, whole: bool = False
    ) -> None:
        self.path = path
        self.shown = shown
        self.parse = parse
        self.whole = whole
        self._starts, self._ends, self._lines = array("q"), array("q"), array("I")

    def add(self, start: int, end: int, line: int) -> None:
        """Add the row in bytes ``start`` to ``end``, which begins in ``line`` (from 1)."""
        self._starts.append(start)
        self._ends.append(end)
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, index: int) -> str:
        """File and line."""
        return f"{self.shown} line {self._lines[index]}"

    def read(self, index: int) -> Any:
        """Text of row ``index``, or the whole row. The file is opened each time, so that forked workers share no position in it."""
        start, end = self._starts[index], self._ends[index]
        place = self.place(index)
        data = _bytes_of(self.path, start, end)
        try:
            value = self.parse(data, place)
            return value if self.whole else text_of(value, place)
        except UnicodeDecodeError as error:
            raise BadRow(
                "invalid_utf8", place, f"byte {error.start} of the row is not UTF-8"
            ) from error


def _bytes_of(path: Path, start: int, end: int) -> bytes:
    """Part of a file, as far as there is one; read without a buffer, which takes half of the time."""
    file = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(file, end - start, start)
        while len(data) < end - start:  # one call reads 2 GiB at most
            more = os.pread(file, end - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(file)
