"""From the loader to the device: draws a step ahead, and lets the ranks agree before they use what they drew."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.batch import Batch
from torchtitan.data.loader import Loader, LoaderStep
from torchtitan.errors import DataError
from torchtitan.parallel.context import cut
from torchtitan.parallel.mesh import Mesh
from torchtitan.training.signals import StopRequest


@dataclass(frozen=True, slots=True)
class Fed:
    """What one step trains on.

    Attributes:
        microbatches: on the device.
        loader_state: this data rank's position after these rows.
        counts: the loader's running counts on this rank.
        wait_s: seconds that the step waited for data and for the other ranks to have theirs.
        utilisation: share of this rank's tokens so far that samples fill; None where nothing stays empty.
    """

    microbatches: list[Batch]
    loader_state: dict[str, Any]
    counts: dict[str, int]
    wait_s: float
    utilisation: float | None = None


@dataclass(slots=True)
class _Drawn:
    step: LoaderStep | None
    error: DataError | None
    flags: torch.Tensor
    work: dist.Work | None


class Feed:
    """Iterates over steps.

    The next step's rows are drawn before a step is handed out, and while it computes a small all-reduce on the CPU
    group tells whether any rank failed to draw or was asked to stop; its answer is there when the step ends. So all ranks leave at the same
    step, and a rank without data makes all of them raise instead of hanging.

    Args:
        loader: of this data rank.
        mesh: of the run.
        micro_batch_rows: rows of a micro-batch.
        stop: the signals of this rank.
    """

    def __init__(
        self, loader: Loader, mesh: Mesh, micro_batch_rows: int, stop: StopRequest
    ) -> None:
        self._loader = loader
        self._mesh = mesh
        self._micro_batch_rows = micro_batch_rows
        self._stop = stop
        self.stopped = False

    def steps(self, count: int) -> Iterator[Fed]:
        """Yield up to ``count`` steps; end early, with ``stopped`` set, when some rank was asked to stop.

        Raises:
            DataError: on all ranks, if one of them has no data.
        """
        drawn = self._draw() if count > 0 else None
        try:
            while drawn is not None:
                start = time.perf_counter()
                step, self.stopped = self._agree(drawn)
                if self.stopped:
                    return
                microbatches = to_microbatches(step.batch, self._micro_batch_rows, self._mesh)
                count -= 1
                drawn = self._draw() if count > 0 else None
                wait_s = time.perf_counter() - start
                yield Fed(microbatches, step.state, step.counts, wait_s, step.utilisation)
        finally:
            if drawn is not None and drawn.work is not None:
                drawn.work.wait()  # a run that ends early leaves no collective behind

    def _draw(self) -> _Drawn:
        step, error = None, None
        try:
            step = self._loader.next()
        except DataError as caught:
            error = caught
        flags = torch.tensor([float(error is not None), float(self._stop.received is not None)])
        work = None
        if self._mesh.world_size > 1:
            work = dist.all_reduce(
                flags, op=dist.ReduceOp.MAX, group=self._mesh.control, async_op=True
            )
        return _Drawn(step, error, flags, work)

    def _agree(self, drawn: _Drawn) -> tuple[LoaderStep, bool]:
        if drawn.work is not None:
            drawn.work.wait()
        failed, stop = (bool(flag) for flag in drawn.flags.tolist())
        if self._mesh.world_size == 1:
            stop = self._stop.received is not None
        if drawn.error is not None:
            raise drawn.error
        if failed or drawn.step is None:
            raise DataError("another rank has no data; see its message")
        return drawn.step, stop


def to_microbatches(batch: Batch, rows: int, mesh: Mesh) -> list[Batch]:
    """This rank's part of a data rank's rows, as micro-batches of ``rows`` rows (the last may have fewer) on its device."""
    batch, device = cut(batch, mesh.cp, mesh.context.kind), mesh.device
    if device.type == "cuda":
        batch = {
            name: field.pin_memory().to(device, non_blocking=True) for name, field in batch.items()
        }
    total = next(iter(batch.values())).shape[0]
    return [
        {name: field[start : start + rows] for name, field in batch.items()}
        for start in range(0, total, rows)
    ]
