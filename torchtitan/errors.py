"""Every way a run can end, as an exception with its own exit code."""

from typing import ClassVar


class TorchtitanError(Exception):
    """Base of the errors that a run reports in one sentence, without a traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(TorchtitanError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2


class DataError(TorchtitanError):
    """Data that cannot be read, or that is not enough for one global batch."""

    exit_code = 3


class CheckpointError(TorchtitanError):
    """A checkpoint that cannot be written, read, or resumed from."""

    exit_code = 4


class NumericsError(TorchtitanError):
    """A loss or gradient that is not finite; nothing was saved from that step."""

    exit_code = 5


class DistributedError(TorchtitanError):
    """A rank that died, hung, or disagreed with the others."""

    exit_code = 6


class Preempted(TorchtitanError):  # noqa: N818 - an end, not an error
    """The run was asked to stop; it saved a checkpoint and can be resumed."""

    exit_code = 7


EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "an error of the program itself (its traceback is shown)",
    2: "configuration: nothing was started; every problem is listed",
    3: "data: missing, unreadable, or too little for one global batch",
    4: "checkpoint: could not be written, read, or resumed from",
    5: "numerics: a loss or gradient was not finite; nothing was saved from that step",
    6: "distributed: a rank died, hung or disagreed",
    7: "preempted: SIGTERM or Ctrl-C; a checkpoint was saved, run again to resume",
}
"""Exit code -> meaning, as documented in the README and ``torchtitan --help``."""
