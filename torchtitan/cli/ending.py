"""How a command ends: an exit code, and the text that says why."""

import json
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.cli.output import complain
from torchtitan.errors import DistributedError, Preempted, TorchtitanError

_COLLECTIVE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "gloo/transport",
    "NCCL error",
    "Application timeout caused pair closure",
    "remote worker",
)


@dataclass(frozen=True, slots=True)
class Ending:
    """An exit code (see `errors.EXIT_CODES`) and its reason, which may have several lines."""

    code: int
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Ending":
        """The ending that an exception is: a sentence if we know it, else its traceback."""
        if isinstance(error, TorchtitanError):
            return cls(error.exit_code, str(error))
        if isinstance(error, KeyboardInterrupt):
            return cls(Preempted.exit_code, "interrupted before anything was started")
        if _is_collective_failure(error):
            return cls(
                DistributedError.exit_code,
                f"a collective failed ({_gist(error)}); another rank died or hung: look for its message, then "
                "run the same command again to resume from the last checkpoint",
            )
        return cls(1, "".join(traceback.format_exception(error)))

    def show(self) -> None:
        """Write the text to stderr, if there is one."""
        if self.text:
            known = self.code not in (1, Preempted.exit_code)
            complain(f"error: {self.text}" if known else self.text)

    def write(self, file: Path) -> None:
        """Store it for the launcher; the file appears whole or not at all."""
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(unfinished, file)

    @classmethod
    def read(cls, file: Path) -> "Ending | None":
        """What `write` stored; None if nothing was."""
        if not file.is_file():
            return None
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def _is_collective_failure(error: BaseException) -> bool:
    """Whether torch's error means that a rank did not take part; it has a class of its own only for NCCL."""
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _COLLECTIVE_TEXTS)


def _gist(error: BaseException) -> str:
    """The message without the place in torch's source and without gloo's advice."""
    first_line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[\S+\.\w+:\d+\] ", "", first_line)


def run_command(command: Callable[[], int], report: Path | None = None) -> int:
    """Run ``command``; turn what it raises into its exit code and its text.

    Args:
        command: returns an exit code.
        report: where to leave the ending for a launcher, which then shows it; None shows it here.
    """
    try:
        return command()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every end of a command has a code
        ending = Ending.of(error)
    if report is None:
        ending.show()
    elif not report.exists():
        ending.write(report)
    return ending.code
