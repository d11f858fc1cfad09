"""CSV with a header line; quoted fields may hold commas and line ends."""

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torchtitan.data.formats.rows import BOM, FileOptions, Spans
from torchtitan.data.source import BadRow
from torchtitan.errors import DataError

_MAX_FIELD = (1 << 31) - 1  # the default of the csv module, 128 KiB, is less than a long document


def open_csv(path: Path, shown: Path, options: FileOptions) -> Spans:
    """Every record after the header that is not blank is a row.

    Raises:
        DataError: if the header has no such column.
    """
    csv.field_size_limit(_MAX_FIELD)
    lines = _Lines(path)
    records = csv.reader(lines)
    header = next((record for record in records if any(map(str.strip, record))), [])
    if header and options.text_field is not None and options.text_field not in header:
        raise DataError(
            f"{shown}: no column {options.text_field!r}; it has {', '.join(header)}: set text_field to one of them"
        )
    whole = options.text_field is None
    parse = partial(_parse_record, header=header, text_field=options.text_field)
    rows = Spans(path, shown, parse, whole=whole)
    while True:
        start, line = lines.offset, records.line_num + 1
        try:
            blank = next(records) == []
        except StopIteration:
            return rows
        except csv.Error:
            blank = False  # reading the row says what is wrong with it
        if not blank:
            rows.add(start, lines.offset, line)


def _parse_record(data: bytes, place: str, *, header: list[str], text_field: str | None) -> object:
    csv.field_size_limit(_MAX_FIELD)
    try:
        record = next(csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True))
    except csv.Error as error:
        raise BadRow("broken", place, f"broken CSV: {error}") from error
    if text_field is None:
        return dict(zip(header, record, strict=False))
    column = header.index(text_field)
    if column >= len(record):
        raise BadRow(
            "missing_field", place, f"{len(record)} fields, too few for the column {text_field!r}"
        )
    return record[column]


class _Lines:
    """The lines of a file as text, and how many bytes the parser has taken so far."""

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self._path = path

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            for line in file:
                text = line.removeprefix(BOM) if self.offset == 0 else line
                self.offset += len(line)
                yield text.decode("utf-8", "surrogateescape")  # only the structure counts here
