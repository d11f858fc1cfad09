"""TensorBoard event files."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.configurable import Problem
from torchtitan.metrics.run_info import RunInfo
from torchtitan.metrics.sinks.base import GeneratedText, Row, Sink
from torchtitan.optional import is_installed, require


class TensorBoard(Sink):
    """Writes every number as a scalar below ``tensorboard/`` in the run folder."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Settings of the TensorBoard sink (extra ``tensorboard``)."""

        enabled: bool = False
        """Whether event files are written."""

        def check(self) -> Iterator[Problem]:
            """The package is there if it is asked for."""
            if self.enabled and not is_installed("tensorboard"):
                yield Problem(
                    "enabled",
                    True,
                    "the package 'tensorboard' is not installed",
                    "run: pip install 'torchtitan[tensorboard]'",
                )

        def build(self, *, folder: Path, run: RunInfo) -> "TensorBoard":
            """Open an event file; a resumed run hides what an earlier one wrote after ``run.start_step``."""
            require("tensorboard", extra="tensorboard", purpose="metrics.tensorboard")
            module = importlib.import_module("torch.utils.tensorboard")
            purge_step = run.start_step + 1 if run.start_step else None
            return TensorBoard(
                module.SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
            )

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, rows: list[Row]) -> None:
        """Add the rows' numbers, each at its step."""
        for row in rows:
            for name, value in row.items():
                if name != "global_step":
                    self._writer.add_scalar(name, value, int(row["global_step"]))
        self._writer.flush()

    def log_texts(self, step: int, texts: Sequence[GeneratedText]) -> None:
        """Add the texts, each number of them as a series."""
        for number, text in enumerate(texts, start=1):
            body = f"{_quoted(text.prompt)}\n\n{_quoted(text.text)}\n\n{text.finish_reason}"
            self._writer.add_text(f"samples/{number}", body, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _quoted(text: str) -> str:
    """As a block of code in Markdown, which TensorBoard shows letter by letter."""
    return "\n".join("    " + line for line in text.splitlines())
