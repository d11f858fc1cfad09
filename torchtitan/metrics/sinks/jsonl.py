"""The series of a run as a file: one JSON object a line, one line a step."""

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from torchtitan.metrics.sinks.base import GeneratedText, Row, Sink

log = logging.getLogger(__name__)


class Jsonl(Sink):
    """Appends rows to ``metrics.jsonl``, and texts to ``samples.jsonl`` beside it; always on, so it has no settings.

    Numbers are written in full precision: reading them gives the same float bit for bit. One that is not finite is
    written as ``null``, since JSON has no word for it.

    Args:
        path: the file of the rows; made if it does not exist.
        start_step: steps already done; rows of later steps are from a run that did not keep them (it was killed
            after its last checkpoint) and are removed. 0 starts the series anew.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self._file = _continue_series(path, start_step)
        self._texts_path = path.with_name("samples.jsonl")
        self._texts: TextIO | None = None
        if self._texts_path.exists():
            self._texts = _continue_series(self._texts_path, start_step)

    def log(self, rows: list[Row]) -> None:
        """Append the rows and hand them to the operating system."""
        self._file.write("".join(_line(row) for row in rows))
        self._file.flush()

    def log_texts(self, step: int, texts: Sequence[GeneratedText]) -> None:
        """Append the texts, with their step."""
        if self._texts is None:
            self._texts = self._texts_path.open("a", encoding="utf-8")
        for text in texts:
            line = json.dumps({"global_step": step, **asdict(text)}, ensure_ascii=False)
            self._texts.write(line + "\n")
        self._texts.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._texts is not None:
            self._texts.close()


def read_rows(path: Path) -> list[Row]:
    """Rows of a ``metrics.jsonl``; ``null`` becomes NaN.

    Lines that are not whole (a crash in the middle of a write tears the last one) are left out.
    """
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row, _ in _whole_lines(path)
    ]


def _whole_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The rows of a file, each with its line."""
    found: list[tuple[dict[str, Any], str]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "global_step" in row:
            found.append((row, line + "\n"))
    return found


def _line(row: Row) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _continue_series(path: Path, start_step: int) -> TextIO:
    """Open ``path`` for appending, with the rows of steps 1..``start_step`` in it and no others."""
    if path.exists():
        found = _whole_lines(path)
        kept = [line for row, line in found if start_step > 0 and row["global_step"] <= start_step]
        if len(kept) < len(found):
            log.info("%s: removed %d rows after step %d", path, len(found) - len(kept), start_step)
        new = path.with_name(path.name + ".new")
        with new.open("w", encoding="utf-8") as file:
            file.write("".join(kept))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    return path.open("a", encoding="utf-8")
