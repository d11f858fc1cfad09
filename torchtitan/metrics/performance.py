"""Speed, utilisation, memory and the time that is left, from the steps between two logged ones."""

import resource
import sys
import time
from collections.abc import Callable

import torch

from torchtitan.metrics.run_info import RunInfo

PERFORMANCE_NAMES = frozenset(
    {
        "window_steps",
        "seconds_per_step",
        "tokens_per_second",
        "tflops_per_device",
        "mfu",
        "peak_memory_gib",
        "data_wait_fraction",
        "eta_s",
    }
)
_GIB = 2**30


class Performance:
    """Clock of the run; a window is what happened since the last logged step.

    A window leaves nothing out: validation, checkpoints and, in the first one, warm-up and compilation are part of
    it. The first window of a process is its first step alone, so later ones are free of the start.

    Args:
        run: the run that is measured.
        peak_tflops: peak of one device in TFLOP/s; None leaves MFU out.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: RunInfo,
        peak_tflops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run = run
        self._peak_tflops = peak_tflops
        self._clock = clock
        self._window_steps = 0
        self._data_wait_s = 0.0
        self._warm_start: tuple[int, float] | None = (
            None  # (step, time) when the first window ended
        )
        self.begin()

    def begin(self) -> None:
        """The first step comes now; what was before it, such as an evaluation of the initial weights, is in no window."""
        self._window_start_s = self._clock()

    def step_done(self, data_wait_s: float) -> None:
        """Count one step that waited ``data_wait_s`` seconds for its batch."""
        self._window_steps += 1
        self._data_wait_s += data_wait_s

    def close_window(self, step: int) -> dict[str, float | int]:
        """The numbers of the window that ends now, after ``step``; the device has been waited for."""
        run, now_s = self._run, self._clock()
        elapsed_s = max(now_s - self._window_start_s, 1e-9)
        tokens_per_second = run.tokens_per_step_global * self._window_steps / elapsed_s
        tflops = run.flops_per_token * tokens_per_second / run.world_size / 1e12
        numbers: dict[str, float | int] = {
            "window_steps": self._window_steps,
            "seconds_per_step": elapsed_s / self._window_steps,
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": tflops,
            "peak_memory_gib": peak_memory_gib(run.device_type),
            "data_wait_fraction": self._data_wait_s / elapsed_s,
            "eta_s": self._eta_s(step, now_s, elapsed_s / self._window_steps),
        }
        if self._peak_tflops is not None:
            numbers["mfu"] = tflops / self._peak_tflops
        self._warm_start = self._warm_start or (step, now_s)
        self._window_start_s, self._window_steps, self._data_wait_s = now_s, 0, 0.0
        return numbers

    def _eta_s(self, step: int, now_s: float, seconds_per_step: float) -> float:
        """Seconds left at the mean pace since the first window, which knows only itself."""
        if self._warm_start and step > self._warm_start[0]:
            seconds_per_step = (now_s - self._warm_start[1]) / (step - self._warm_start[0])
        return seconds_per_step * max(self._run.total_steps - step, 0)


def peak_memory_gib(device_type: str) -> float:
    """Most memory that this process has held, in GiB: PyTorch's on the GPU, else resident."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated() / _GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
