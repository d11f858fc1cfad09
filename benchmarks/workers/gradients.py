"""A rank of a run whose live gradients and resident memory are measured, for ``benchmarks/optimizer_in_backward.py``."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from serving import serve
from torch import Tensor, nn

from benchmarks.runs import Run, forget_peak, status, timed


def local_of(tensor: Tensor) -> Any:
    """This rank's part."""
    return getattr(tensor, "_local_tensor", tensor)


class Counted:
    """A run whose gradients are counted whenever parameters are updated, before they are freed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.optimizer = run.trainer.models["policy"].optimizer
        self.most = 0
        self._update = self.optimizer.update
        self.optimizer.update = self._counted

    def alive(self) -> int:
        """Bytes of the storages of all gradients there are; those of an FSDP unit share one."""
        grads = [local_of(p.grad) for p in self.optimizer.slots if p.grad is not None]
        storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage() for grad in grads}
        return sum(storage.nbytes() for storage in storages.values())

    def _counted(self, parameters: Sequence[nn.Parameter], skip: Tensor) -> None:
        self.most = max(self.most, self.alive())
        self._update(parameters, skip)


counted = Counted(Run.of(json.loads(sys.argv[1])))
before = forget_peak()


def steps(number: int) -> dict[str, Any]:
    """Losses, seconds and memory of ``number`` steps.

    ``peak_bytes`` is the process's high-water mark since the run was built, ``added_bytes`` what of it the steps added.
    """
    seconds, losses = zip(*(timed(counted.run, 1) for _ in range(number)), strict=True)
    peak = status("VmHWM")
    everything = sum(local_of(p).nbytes for p in counted.optimizer.slots)
    return {
        "losses": losses,
        "seconds": seconds,
        "alive_bytes": counted.most,
        "all_bytes": everything,
        "peak_bytes": peak,
        "added_bytes": peak - before,
    }


serve({"steps": steps})
counted.run.trainer.close()
