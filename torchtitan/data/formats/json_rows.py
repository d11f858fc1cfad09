"""JSON: one object a line, or an array of objects, or objects one after the other."""

import json
import mmap
import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from torchtitan.data.formats.rows import BOM, FileOptions, Spans
from torchtitan.data.source import BadRow

_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[{}\[\],]', re.DOTALL)
_LINES_TRIED = 10


def open_json_lines(path: Path, shown: Path, options: FileOptions) -> Spans:
    """Every line that is not blank is a row."""
    rows = _spans(path, shown, options)
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace() and line.strip() != BOM:
                rows.add(start, start + len(line), number)
            start += len(line)
    return rows


def open_json(path: Path, shown: Path, options: FileOptions) -> Spans:
    """The elements of an array, or the objects of the file; JSON lines under this extension are read as such."""
    with path.open("rb") as file:
        if _is_json_lines(file):
            return open_json_lines(path, shown, options)
        rows = _spans(path, shown, options)
        if path.stat().st_size > 0:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                line, counted_to = 1, 0
                for start, end in _elements(data):
                    begin = end - len(
                        data[start:end].lstrip()
                    )  # not in the line of the comma before it
                    line, counted_to = line + data[counted_to:begin].count(b"\n"), begin
                    rows.add(begin, end, line)
        return rows


def _spans(path: Path, shown: Path, options: FileOptions) -> Spans:
    parse = partial(parse_object, text_field=options.text_field)
    return Spans(path, shown, parse, whole=options.text_field is None)


def parse_object(data: bytes, place: str, *, text_field: str | None) -> object:
    """The text field of one JSON object, or the whole object."""
    try:
        row = json.loads(data.removeprefix(BOM).rstrip().decode("utf-8"))
    except json.JSONDecodeError as error:
        raise BadRow(
            "broken", place, f"broken JSON: {error.msg} at character {error.pos + 1}"
        ) from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets
        raise BadRow("broken", place, f"broken JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow("broken", place, f"not a JSON object but a {type(row).__name__}")
    if text_field is None:
        return row
    if text_field not in row:
        raise BadRow("missing_field", place, f"no field {text_field!r} among {sorted(row)[:10]}")
    return row[text_field]


def _is_json_lines(file: BinaryIO) -> bool:
    """Whether the file begins with an object and one of its first lines is an object by itself."""
    lines = (line.removeprefix(BOM).strip() for line in file)
    first_lines = list(islice((line for line in lines if line), _LINES_TRIED))
    if not first_lines or not first_lines[0].startswith(b"{"):
        return False
    for line in first_lines:
        try:
            if isinstance(json.loads(line), dict):
                return True
        except (ValueError, RecursionError):
            continue
    return False


def _elements(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Spans of the elements of a top-level array, or of the top-level objects where there is no array.

    Follows strings and brackets only; what is between them is judged when the row is read. An
    element that the end of the file cuts off is given as it is, so that it counts as a broken row.
    """
    start = len(BOM) if data[: len(BOM)] == BOM else 0
    array_depth = 0
    depth = 0
    for match in _STRUCTURE.finditer(data, start):
        token = match[0]
        if token in b"{[":
            if depth == 0 and token == b"[" and not data[start : match.start()].strip():
                array_depth, start = 1, match.end()
            depth += 1
        elif token in b"}]":
            depth = max(0, depth - 1)
            if depth == 0 and array_depth == 0:
                yield start, match.end()
                start = match.end()
            elif depth == 0:
                break
        elif token == b"," and depth == 1 and array_depth == 1:
            yield start, match.start()
            start = match.end()
    else:
        match = None
    end = len(data) if match is None else match.start()
    if data[start:end].strip():
        yield start, end
