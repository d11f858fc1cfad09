"""Parquet: the text column (or all of them) is copied once into an Arrow file, whose rows can be read in any order.

Parquet itself is compressed by row group, so that reading shuffled rows would decode a group for
each.
"""

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.data.cache import cached_copy
from torchtitan.data.formats.rows import FileOptions
from torchtitan.data.source import BadRow, text_of
from torchtitan.errors import DataError
from torchtitan.optional import require

_BATCH_ROWS = 1024


class ArrowFile:
    """The rows of an Arrow file, mapped into memory when the first is read.

    Args:
        path: the file.
        shown: the file that the user knows, for messages.
        whole: whether a row is all columns, and not the text of the only one.
    """

    def __init__(self, path: Path, shown: Path, *, whole: bool = False) -> None:
        self.whole = whole
        self.path = path
        self.shown = shown
        self._opened: Any = None
        batches = (self._reader().get_batch(i) for i in range(self._reader().num_record_batches))
        self._ends = list(accumulate(batch.num_rows for batch in batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> str:
        """File and row."""
        return f"{self.shown} row {index + 1}"

    def read(self, index: int) -> Any:
        """Text of row ``index``, or the whole row."""
        batch = bisect_right(self._ends, index)
        first = self._ends[batch - 1] if batch else 0
        place = self.place(index)
        try:
            if self.whole:
                return self._reader().get_batch(batch).slice(index - first, 1).to_pylist()[0]
            return text_of(self._reader().get_batch(batch).column(0)[index - first].as_py(), place)
        except UnicodeDecodeError as error:
            raise BadRow(
                "invalid_utf8", place, f"byte {error.start} of the text is not UTF-8"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _reader(self) -> Any:
        if self._opened is None:
            arrow = require("pyarrow", extra="data", purpose="reading Parquet files")
            self._opened = arrow.ipc.open_file(arrow.memory_map(str(self.path)))
        return self._opened


def open_parquet(path: Path, shown: Path, options: FileOptions) -> ArrowFile:
    """Copy the text column, if that is not done yet, and open the copy.

    Raises:
        DataError: if the file is damaged or has no such column.
    """
    copy = cached_copy(
        path,
        suffix=".arrow",
        variant=options.text_field or "",
        folder=options.cache_folder,
        write=partial(_copy_column, path, shown, options.text_field),
    )
    return ArrowFile(copy, shown, whole=options.text_field is None)


def _copy_column(path: Path, shown: Path, text_field: str | None, copy: Path) -> None:
    arrow = require("pyarrow", extra="data", purpose="reading Parquet files")
    parquet = require("pyarrow.parquet", extra="data", purpose="reading Parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field is not None and text_field not in names:
                raise DataError(
                    f"{shown}: no column {text_field!r}; it has {', '.join(names)}: set text_field to one of them"
                )
            kept = names if text_field is None else [text_field]
            schema = arrow.schema([file.schema_arrow.field(name) for name in kept])
            with arrow.ipc.new_file(str(copy), schema) as out:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=kept):
                    out.write_batch(batch.cast(schema))
    except arrow.ArrowInvalid as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{shown}: not a readable Parquet file ({reason}); restore or remove it"
        ) from error
