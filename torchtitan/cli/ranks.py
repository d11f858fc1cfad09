"""One rank: its process as the launcher sees it, and what the process does to be seen."""

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtitan.cli.ending import Ending
from torchtitan.errors import DistributedError, Preempted

CLOSE_S = 30.0
"""Seconds that a rank gets to close its run after it failed: flush metrics, draw curves."""
TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class RankProcess:
    """A rank that the launcher started.

    Attributes:
        rank: its number among all ranks.
        process: leader of a session of its own.
        report: where the rank writes its `Ending` if it fails.
        errors: its stderr, if that is not shown.
        ended_by_us: whether the launcher ended it because another rank failed, or because it did not obey.
    """

    rank: int
    process: "subprocess.Popen[bytes]"
    report: Path
    errors: Path | None
    ended_by_us: bool = False

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than done or preempted."""
        return self.process.returncode not in (None, 0, Preempted.exit_code)

    def is_failing(self) -> bool:
        """Whether it failed, or has said so and is closing its run."""
        ending = self.ending()
        return self.failed or (ending is not None and ending.code != Preempted.exit_code)

    def has_own_error(self) -> bool:
        """Whether it said something else than that it lost the others."""
        ending = self.ending()
        return ending is not None and ending.code != DistributedError.exit_code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the rank that is not to be taken for its own failure."""
        self.ended_by_us = True
        self.send(number)

    def kill_what_is_left(self) -> None:
        """Kill the rank and every process that it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        """The end of its stderr, if that was not shown."""
        if self.errors is None:
            return ""
        lines = self.errors.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in lines[-TAIL_LINES:])

    def ending(self) -> Ending | None:
        """What the rank said of its end."""
        return Ending.read(self.report)


def be_a_rank(launcher_pid: int) -> None:
    """Let this process end with its launcher, write whole lines, and write all stacks on SIGUSR1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux":  # elsewhere a launcher killed by SIGKILL leaves its ranks behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher_pid:  # it ended before the line above
            signal.raise_signal(signal.SIGTERM)
