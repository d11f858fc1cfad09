"""Progress on the screen: a bar on a terminal, a line for each logged step elsewhere."""

import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

from torchtitan.environment import no_color
from torchtitan.metrics.run_info import RunInfo
from torchtitan.metrics.sinks.base import GeneratedText, Row, Sink

_BAR_CELLS = 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class Console(Sink):
    """Shows the logged steps and the validations.

    On a terminal, a bar is redrawn in place; log records and validations move up above it. Elsewhere each logged step
    is a line of its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Settings of the console."""

        style: Literal["auto", "bar", "lines"] = "auto"
        """A bar that is redrawn in place, or a line for each logged step; auto takes the bar on a terminal,
        unless `NO_COLOR` is set."""

        show: list[str] = field(default_factory=list)
        """Names of further metrics to show, such as a probe's."""

        def build(self, *, folder: Path, run: RunInfo, stream: TextIO | None = None) -> "Console":
            """Take over the last line of the terminal.

            Args:
                folder: unused, as nothing is stored.
                run: gives the number of steps.
                stream: where to write; None is ``sys.stderr``, which leaves the standard output to the program.
            """
            target = stream or sys.stderr
            bar = self.style == "bar" or (
                self.style == "auto" and target.isatty() and not no_color()
            )
            return Console(target, run, bar=bar, color=bar and not no_color(), show=self.show)

    def __init__(
        self, stream: TextIO, run: RunInfo, *, bar: bool, color: bool, show: list[str]
    ) -> None:
        self._stream = stream
        self._run = run
        self._bar = bar
        self._color = color
        self._show = show
        self._row: Row | None = None  # what the bar shows
        self._lock = threading.RLock()  # log records come from any thread
        self._guards: list[tuple[logging.Logger, logging.Handler]] = []
        if bar:
            self._guard_log_records()

    def log(self, rows: list[Row]) -> None:
        """Show the last row, if it is a logged step or a validation."""
        row = rows[-1]
        if any(name.startswith("validation_") for name in row):
            self._print(_validation_line(row, self._run))
        elif "tokens_per_second" in row and not self._bar:
            self._print(f"step {_progress(row, self._run)} | {_numbers(row, self._show)}")
        elif "tokens_per_second" in row:
            with self._lock:
                self._erase()
                self._row = row
                self._draw()

    def log_texts(self, step: int, texts: Sequence[GeneratedText]) -> None:
        """Show the texts, each with what it goes on from."""
        progress = _progress({"global_step": step}, self._run)
        for number, text in enumerate(texts, start=1):
            head = f"step {progress} | sample {number} ({text.finish_reason})"
            self._print(f"{head}\n{_indented(text.prompt, '>')}\n{_indented(text.text, ' ')}")

    def close(self) -> None:
        """Leave the bar as the last line and give the terminal back."""
        for logger, guard in self._guards:
            logger.removeHandler(guard)
        if self._bar and self._row is not None:
            self._stream.write("\n")
            self._row = None
        self._stream.flush()

    def _print(self, line: str) -> None:
        with self._lock:
            self._erase()
            self._stream.write(self._writable(line) + "\n")
            self._draw()
            self._stream.flush()

    def _writable(self, line: str) -> str:
        encoding = self._stream.encoding or "utf-8"  # of a terminal that may know few characters
        return line.encode(encoding, "backslashreplace").decode(encoding)

    def _draw(self) -> None:
        if self._bar and self._row is not None:
            self._stream.write("\r" + self._bar_line(self._row))
            self._stream.flush()

    def _erase(self) -> None:
        if self._bar and self._row is not None:
            self._stream.write("\r" + " " * _width() + "\r")
            self._stream.flush()

    def _bar_line(self, row: Row) -> str:
        fraction = row["global_step"] / max(self._run.total_steps, 1)
        utf8 = (self._stream.encoding or "").lower().startswith("utf")
        full, empty = ("━", "─") if utf8 else ("#", ".")
        done = full * int(fraction * _BAR_CELLS)
        text = f" {_progress(row, self._run)} | {_numbers(row, self._show)}"
        text = text[: _width() - _BAR_CELLS]  # a line that wraps could not be redrawn
        done_color, end = (_GREEN, _PLAIN) if self._color else ("", "")
        return done_color + done + end + empty * (_BAR_CELLS - len(done)) + text

    def _guard_log_records(self) -> None:
        """Erase the bar before the first handler writes a record, and draw it again after the last."""
        # A run's own logger does not propagate.
        for logger in (logging.getLogger(), logging.getLogger("torchtitan")):
            before, after = _Callback(self._erase), _Callback(self._draw)
            logger.handlers.insert(0, before)
            logger.addHandler(after)
            self._guards += [(logger, before), (logger, after)]


class _Callback(logging.Handler):
    """Calls a function for each record."""

    def __init__(self, fn: Callable[[], None]) -> None:
        super().__init__()
        self._fn = fn

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._fn()
        except Exception:  # noqa: BLE001 - as every handler: a closed terminal must not fail the logging code
            self.handleError(record)


def _width() -> int:
    """Cells that a line may use; the last one stays free, as some terminals wrap after it."""
    return max(shutil.get_terminal_size().columns - 1, _BAR_CELLS + 20)


def _progress(row: Row, run: RunInfo) -> str:
    step, total = int(row["global_step"]), run.total_steps
    return f"{step}/{total} {100 * step // max(total, 1):3d}%"


def _numbers(row: Row, show: list[str]) -> str:
    """The numbers of a logged step, the most wanted first, as a narrow terminal cuts the end."""
    formats: dict[str, Callable[[float], str]] = {
        "loss": lambda x: f"loss {x:.4f}",
        "lr": lambda x: f"lr {x:.2e}",
        "grad_norm": lambda x: f"grad norm {x:.3f}",
        "tokens_per_second": lambda x: f"{_short(x)} tok/s",
        "eta_s": lambda x: f"ETA {_duration(x)}",
        "tflops_per_device": lambda x: f"{x:.3g} TFLOP/s",
        "mfu": lambda x: f"MFU {100 * x:.1f}%",
        "peak_memory_gib": lambda x: f"{x:.2f} GiB",
    }
    known = [write(row[name]) for name, write in formats.items() if name in row]
    return " | ".join(known + [f"{name} {row[name]:.4g}" for name in show if name in row])


def _validation_line(row: Row, run: RunInfo) -> str:
    values = [
        f"{name.replace('_', ' ', 1)} {value:.4f}"
        for name, value in row.items()
        if name != "global_step"
    ]
    return f"step {_progress(row, run)} | {' | '.join(values)}"


def _indented(text: str, mark: str) -> str:
    """``text`` behind ``mark``, without characters that move a terminal's cursor or change its colours."""
    lines = _CONTROL.sub("\ufffd", text).expandtabs().split("\n")
    return "\n".join(f"  {mark} {line}".rstrip() for line in lines)


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {secs:02d}s" if minutes else f"{secs}s"
