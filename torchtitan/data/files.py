"""Local files: JSON lines, JSON, CSV, Parquet and text, plain or compressed; one, a folder, or a glob."""

import glob
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.config.configurable import Problem
from torchtitan.data.formats.opening import (
    FORMATS,
    PACKAGES,
    cannot_read,
    known_extensions,
    open_rows,
)
from torchtitan.data.formats.rows import FileOptions
from torchtitan.data.source import MapSource, Source
from torchtitan.errors import DataError
from torchtitan.optional import is_installed

_KNOWN = f"one of {', '.join(FORMATS)}, also with .gz or .zst (not .parquet)"


class Files(MapSource):
    """The rows of local files, in the order of the paths and, inside a folder or glob, of the names."""

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        """Local files."""

        OPERATIONAL: ClassVar[frozenset[str]] = frozenset({"cache_folder"})

        path: str | list[str]
        """File, folder (read with its subfolders) or glob, or a list of them. The format follows from the extension:
        .jsonl, .json, .csv, .parquet, .txt (one document a file), all but .parquet also with .gz or
        .zst."""
        text_field: str = "text"
        """Field or column that holds the text."""
        cache_folder: str | None = None
        """Where the plain copies of compressed and Parquet files are kept; None is ~/.cache/torchtitan."""

        def check(self) -> Iterator[Problem]:
            """The paths exist, and their formats can be read."""
            yield from Source.Config.check(self)
            for path in _as_list(self.path):
                try:
                    files = find_files(path)
                except DataError as error:
                    yield Problem(
                        "path", path, str(error), f"name a file, folder or glob with {_KNOWN}"
                    )
                    continue
                extensions = {extension for file in files for extension in known_extensions(file)}
                for extension, package in PACKAGES.items():
                    if extension in extensions and not is_installed(package):
                        yield Problem(
                            "path",
                            path,
                            f"reading {extension} needs the package {package!r}, which is not installed",
                            "run: pip install 'torchtitan[data]'",
                        )

        def build(self) -> "Files":
            """Find the rows of every file.

            Raises:
                DataError: if a file is missing, unreadable or of an unknown format.
            """
            return Files(self)

        def build_rows(self) -> "Files":
            """The same, for whole rows."""
            return Files(self, whole_rows=True)

    def __init__(self, config: Config, *, whole_rows: bool = False) -> None:
        options = FileOptions(None if whole_rows else config.text_field, config.cache_folder)
        self._paths = _as_list(config.path)
        self._files: list[Path] = []
        for path in self._paths:
            try:
                self._files += find_files(path)
            except DataError as error:
                raise DataError(
                    f"{path}: {error}; name a file, folder or glob with {_KNOWN}"
                ) from error
        self._rows = [open_rows(file, options) for file in self._files]
        self._ends = list(accumulate(len(rows) for rows in self._rows))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> Any:
        """Text of row ``index``, counted over all files, or the whole row."""
        file, row = self._find(index)
        try:
            return self._rows[file].read(row)
        except OSError as error:
            raise cannot_read(self._files[file], error) from error

    def place(self, index: int) -> str:
        """File and line of row ``index``."""
        file, row = self._find(index)
        return self._rows[file].place(row)

    def fingerprint(self) -> str:
        """Paths, sizes and times of change."""
        stats = [(str(file.resolve()), file.stat()) for file in self._files]
        return repr([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])

    def _find(self, index: int) -> tuple[int, int]:
        """Number of the file, and of the row in it."""
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)

    def describe(self) -> str:
        """Name and size for messages."""
        return f"Files({', '.join(self._paths)}): {len(self._files)} files, {len(self)} rows"


def find_files(path: str) -> list[Path]:
    """The files that a path means; in a folder or glob, only those of a known format.

    Raises:
        DataError: if there are none; the text has no path in it.
    """
    location = Path(path).expanduser()
    if location.is_file():
        if not known_extensions(location):
            raise DataError(
                f"the extension {''.join(location.suffixes) or '(none)'} is of no known format"
            )
        return [location]
    if location.is_dir():
        found = [Path(name) for name in glob.glob("**/*", root_dir=location, recursive=True)]
        files = sorted(location / name for name in found)
    elif glob.has_magic(path):
        files = sorted(Path(name) for name in glob.glob(str(location), recursive=True))
    else:
        raise DataError("it does not exist")
    known = [file for file in files if file.is_file() and known_extensions(file)]
    if not known:
        raise DataError(
            f"no file of a known format is there ({len(files)} of another)"
            if files
            else "nothing is there"
        )
    return known


def _as_list(path: str | list[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)
