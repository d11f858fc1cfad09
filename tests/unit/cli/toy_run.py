"""A root config whose run does what its ``act`` says: fail, hang, be killed, or add up numbers over the ranks.

torch, which takes seconds to import, is only loaded for the last.
"""

import importlib
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torchtitan.cli.output import complain, say
from torchtitan.config import Configurable
from torchtitan.environment import rank, world_size
from torchtitan.errors import DataError, NumericsError, Preempted


class Run(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A run."""

        folder: str = ""
        """Run folder."""
        act: Literal[
            "work", "data", "numerics", "bug", "exit", "kill", "hang", "sleep", "close"
        ] = "work"
        """What happens."""
        on_rank: int = 0
        """Where it happens; the others work."""
        timeout_s: float = 60.0
        """Of collectives."""

        def build(self) -> "Run":
            return Run(self)

    def __init__(self, config: Config) -> None:
        self.config = config

    def train(self) -> None:
        if rank() == self.config.on_rank:
            self.act()
        match self.config.act:
            case "sleep":
                self.sleep()
            case "hang":
                raise RuntimeError("[a/pair.cc:5] Timed out waiting 2000ms for recv")
            case "work" | "kill" if world_size() > 1:
                self.add_up()
        say(f"rank {rank()} of {world_size()} in {self.config.folder}")
        complain(f"threads {os.environ.get('OMP_NUM_THREADS')}")

    def add_up(self) -> None:
        torch = importlib.import_module("torch")
        timeout = timedelta(seconds=self.config.timeout_s)
        torch.distributed.init_process_group("gloo", timeout=timeout)
        numbers = torch.ones(1)
        torch.distributed.all_reduce(numbers)
        say(f"sum {numbers.item():.0f}")
        torch.distributed.destroy_process_group()

    def act(self) -> None:
        match self.config.act:
            case "data":
                raise DataError("no rows in x.jsonl; give some")
            case "numerics":
                raise NumericsError("step 3: loss=nan")
            case "bug":
                raise ZeroDivisionError("a bug of ours")
            case "exit":
                os._exit(9)
            case "kill":
                importlib.import_module("torch").distributed.init_process_group("gloo")
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)

    def sleep(self) -> None:
        """Wait for SIGTERM, as training does, and end in order."""

        def stop(number: int, frame: object) -> None:
            raise Preempted(f"saved step 5 after {signal.Signals(number).name}")

        signal.signal(signal.SIGTERM, stop)
        say(f"ready {os.getpid()}")
        time.sleep(600)

    def close(self) -> None:
        say(f"closed {rank()}")
        if self.config.act == "close":
            raise DataError("closing failed")


def toy_run() -> Run.Config:
    """A run."""
    return Run.Config()


def no_root() -> Configurable.Config:
    """A config that is not a root."""
    return Configurable.Config()
