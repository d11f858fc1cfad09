"""What a sink is: somewhere the numbers of a run go."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config.configurable import Configurable
from torchtitan.metrics.run_info import RunInfo

Row = dict[str, float | int]
"""Metric name -> number. Every row has ``global_step``."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """What the model in training goes on with.

    Attributes:
        prompt: what it was given, special tokens by their names.
        text: what it wrote.
        finish_reason: ``stop`` (it ended by itself) or ``length`` (at the limit).
    """

    prompt: str
    text: str
    finish_reason: str


class Sink(Configurable):
    """Base of the sinks. One exists on rank 0 only; if it raises, it is dropped with one warning."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of a sink."""

        enabled: bool = True
        """Whether the run writes to this sink."""

        def build(self, *, folder: Path, run: RunInfo) -> "Sink":
            """Open the sink.

            Args:
                folder: the run folder, which exists.
                run: the run; ``run.start_step`` is not 0 when it continues an earlier one.
            """
            raise NotImplementedError(f"{type(self).__qualname__} must define build()")

    def log(self, rows: list[Row]) -> None:
        """Take the rows since the last call, in order of steps.

        At a logged step the last row is that step's and carries the performance numbers; a validation arrives as
        one row of its own, with names that start with ``validation_``.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define log()")

    def log_texts(self, step: int, texts: Sequence[GeneratedText]) -> None:
        """Take texts that the model wrote after ``step``; a sink of numbers alone leaves them."""

    def close(self) -> None:
        """Write what is left; called once, also after an exception."""
