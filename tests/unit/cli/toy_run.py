"""A root config whose run does what its ``act`` says: fail, hang, be killed, or add up numbers over the ranks."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

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
        if world_size() > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_s))

    def train(self) -> None:
        if rank() == self.config.on_rank:
            self.act()
        if self.config.act == "sleep":
            self.sleep()
        numbers = torch.ones(1)
        if world_size() > 1:
            dist.all_reduce(numbers)
        print(f"rank {rank()} sum {numbers.item():.0f} in {self.config.folder}")
        print(f"threads {os.environ.get('OMP_NUM_THREADS')}", file=sys.stderr)

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
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)

    def sleep(self) -> None:
        """Wait for SIGTERM, as training does, and end in order."""

        def stop(number: int, frame: object) -> None:
            raise Preempted(f"saved step 5 after {signal.Signals(number).name}")

        signal.signal(signal.SIGTERM, stop)
        print(f"ready {os.getpid()}", flush=True)
        time.sleep(600)

    def close(self) -> None:
        print(f"closed {rank()}")
        if self.config.act == "close":
            raise DataError("closing failed")
        if dist.is_initialized():
            dist.destroy_process_group()


def toy_run() -> Run.Config:
    """A run."""
    return Run.Config()


def no_root() -> Configurable.Config:
    """A config that is not a root."""
    return Configurable.Config()
