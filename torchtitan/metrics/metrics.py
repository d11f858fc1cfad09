"""The numbers of a run: recorded every step, read from the device only at logged steps."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TextIO

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.metrics.peak_flops import peak_tflops
from torchtitan.metrics.performance import PERFORMANCE_NAMES, Performance
from torchtitan.metrics.probes import Probe
from torchtitan.metrics.run_info import RunInfo
from torchtitan.metrics.sinks.base import GeneratedText, Row, Sink
from torchtitan.metrics.sinks.console import Console
from torchtitan.metrics.sinks.jsonl import Jsonl
from torchtitan.metrics.sinks.plots import Plots
from torchtitan.metrics.sinks.tensorboard import TensorBoard
from torchtitan.metrics.sinks.wandb import WandB

log = logging.getLogger(__name__)

_VALIDATION = "validation_"


class Metrics(Configurable):
    """Buffers what each step measured and passes it to the sinks at logged steps.

    A step is logged if it is the first of this process, a multiple of ``every_n_steps``, or the last of the run.
    Every rank calls the same methods, as reductions over ranks may hide in a value; rank 0 alone writes.

    Args:
        config: its settings.
        run: the run that is measured.
        sinks: where rows go, by the name used in warnings; empty on ranks other than 0.
        probes: called at logged steps with ``models``.
        models: the trainer's models by name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What is measured, how often, and where it goes."""

        OPERATIONAL: ClassVar[frozenset[str]] = frozenset(
            {
                "every_n_steps",
                "peak_tflops",
                "console",
                "plots",
                "tensorboard",
                "wandb",
                "sinks",
                "probes",
            }
        )

        every_n_steps: int = 10
        """Steps between two logged ones; the host waits for the device only at these."""

        peak_tflops: float | None = None
        """Peak of one device in dense TFLOP/s for the compute dtype, used for MFU. None takes it from the table of
        known GPUs; for an unknown device MFU is then left out."""

        console: Console.Config = field(default_factory=Console.Config)
        """Progress on the screen."""

        plots: Plots.Config = field(default_factory=Plots.Config)
        """Picture of the curves at the end."""

        tensorboard: TensorBoard.Config = field(default_factory=TensorBoard.Config)
        """TensorBoard event files."""

        wandb: WandB.Config = field(default_factory=WandB.Config)
        """Weights & Biases."""

        sinks: list[Sink.Config] = field(default_factory=list)
        """Further sinks of one's own."""

        probes: list[Probe.Config] = field(default_factory=list)
        """Further metrics, measured on the models at logged steps."""

        def check(self) -> Iterator[Problem]:
            """Ranges."""
            if self.every_n_steps < 1:
                yield Problem(
                    "every_n_steps", self.every_n_steps, "is less than 1", "set 1 or more"
                )
            if self.peak_tflops is not None and not self.peak_tflops > 0:
                yield Problem(
                    "peak_tflops",
                    self.peak_tflops,
                    "is not above 0",
                    "set the device's dense TFLOP/s, or None",
                )

        def build(
            self,
            *,
            folder: Path,
            run: RunInfo,
            models: Mapping[str, nn.Module] | None = None,
            stream: TextIO | None = None,
        ) -> "Metrics":
            """Open the sinks and start the clock.

            Args:
                folder: the run folder; made if it does not exist.
                run: the run that is measured.
                models: the trainer's models by name, needed if there are probes.
                stream: where the console writes; None is ``sys.stderr``.

            Raises:
                ConfigError: if there are probes and no models, or a sink refuses its settings.
            """
            if self.probes and models is None:
                raise ConfigError(
                    f"metrics.probes has {len(self.probes)} entries but Metrics.Config.build() got no models; "
                    "pass models=..., or remove the probes"
                )
            probes = [probe.build() for probe in self.probes]
            sinks: dict[str, Sink] = {}
            try:
                if run.rank == 0:
                    self._open_sinks(sinks, Path(folder), run, stream)
                return Metrics(self, run, sinks, probes, models or {})
            except BaseException:
                for sink in sinks.values():
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        sink.close()
                raise

        def _open_sinks(
            self, sinks: dict[str, Sink], folder: Path, run: RunInfo, stream: TextIO | None
        ) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            sinks["metrics.jsonl"] = Jsonl(folder / "metrics.jsonl", run.start_step)
            if self.console.enabled:
                sinks["console"] = self.console.build(folder=folder, run=run, stream=stream)
            # in the order in which they close: the plots first, as the others may wait for a network
            others: dict[str, Sink.Config] = {
                "plots": self.plots,
                "tensorboard": self.tensorboard,
                "wandb": self.wandb,
            }
            others |= {f"sinks.{i}": config for i, config in enumerate(self.sinks)}
            for name, config in others.items():
                if not config.enabled:
                    continue
                try:
                    sinks[f"metrics.{name}"] = config.build(folder=folder, run=run)
                except ConfigError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
                    log.warning("metrics.%s could not start and is left out: %r", name, error)

    def __init__(
        self,
        config: "Metrics.Config",
        run: RunInfo,
        sinks: dict[str, Sink],
        probes: list[Probe],
        models: Mapping[str, nn.Module],
    ) -> None:
        self.config = config
        self._run = run
        self._sinks = sinks
        self._probes = probes
        self._models = models
        self._added: dict[str, Callable[[], Tensor | float]] = {}
        self._buffer: list[dict[str, Tensor | float]] = []
        peak = config.peak_tflops
        if peak is None and run.device_type == "cuda":
            peak = peak_tflops(run.device_name, run.compute_dtype)
        self._performance = Performance(run, peak)

    def add(self, name: str, fn: Callable[[], Tensor | float]) -> None:
        """Measure one more thing: ``fn`` is called on every rank at logged steps.

        Args:
            name: of the metric, with its unit if it has one.
            fn: gives one number; a tensor stays on its device until all are read together.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self._added or name in PERFORMANCE_NAMES or name == "global_step":
            raise ValueError(f"a metric named {name!r} exists already; choose another name")
        self._added[name] = fn

    def record(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Keep what a step measured; at a logged step, send all that is kept to the sinks.

        Args:
            step: the step that is done, from 1.
            values: name -> number. Tensors have one element, are complete (reduced over ranks, or a DTensor) and
                are copied on the device, so that the caller may write to them. ``data_wait_s`` is a float: seconds
                that this rank waited for its batch.
        """
        measured = {name: _on_device(name, value) for name, value in values.items()}
        logged = self._is_logged(step)
        if logged:
            more = self._measure()
            if taken := sorted(measured.keys() & more.keys()):
                raise ValueError(
                    f"metrics {taken} are recorded by the run and measured by metrics.add or a probe too; "
                    "rename the latter"
                )
            measured |= more
        if self._run.rank != 0:
            return
        self._buffer.append({"global_step": step, **measured})
        wait = values.get("data_wait_s", 0.0)
        self._performance.step_done(0.0 if isinstance(wait, Tensor) else wait)
        if logged:
            rows = self._take_buffer()
            rows[-1] |= self._performance.close_window(step)
            self._send(rows)

    def log_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Send a validation's result to the sinks, as a row of its own.

        Args:
            step: the last step whose update the validated weights have.
            values: name -> number; names get the prefix ``validation_`` where they lack it.
        """
        row: Row = {"global_step": step}
        for name, value in values.items():
            row[_VALIDATION + name.removeprefix(_VALIDATION)] = float(value)
        self.flush()
        self._send([row])
        if step == 0:
            self._performance.begin()

    def log_texts(self, step: int, texts: Sequence[GeneratedText]) -> None:
        """Send texts that the model wrote to the sinks that have a place for them.

        Args:
            step: the last step whose update the weights have.
            texts: the same on all ranks.
        """
        self.flush()
        self._tell(lambda sink: sink.log_texts(step, texts))

    def flush(self) -> None:
        """Send the steps that are kept, without performance numbers.

        To be called before a checkpoint is written: a run that is killed later and resumed there has the rows of all
        its steps.
        """
        if self._buffer:
            self._send(self._take_buffer())

    def close(self) -> None:
        """Send what is kept and close the sinks. May follow an exception: it uses no collective and raises nothing."""
        try:
            self.flush()
        except Exception as error:  # noqa: BLE001 - a lost device must not hide the error that lost it
            log.warning("the metrics of the last %d steps are lost: %r", len(self._buffer), error)
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as in _send
                log.warning("%s failed while closing: %r", name, error)
        self._sinks = {}

    def _is_logged(self, step: int) -> bool:
        run = self._run
        return step % self.config.every_n_steps == 0 or step in (
            run.start_step + 1,
            run.total_steps,
        )

    def _measure(self) -> dict[str, Tensor | float]:
        """The added metrics and the probes, on every rank; still on the device."""
        with torch.no_grad():
            values = {name: _on_device(name, fn()) for name, fn in self._added.items()}
            for probe in self._probes:
                for name, value in probe(self._models).items():
                    values[name] = _on_device(name, value)
        return values

    def _take_buffer(self) -> list[Row]:
        """Empty the buffer, reading all its tensors in one transfer a device."""
        tensors = [
            value for row in self._buffer for value in row.values() if isinstance(value, Tensor)
        ]
        numbers = iter(_read(tensors))
        rows: list[Row] = [
            {
                name: next(numbers) if isinstance(value, Tensor) else value
                for name, value in row.items()
            }
            for row in self._buffer
        ]
        self._buffer = []
        return rows

    def _send(self, rows: list[Row]) -> None:
        self._tell(lambda sink: sink.log(rows))

    def _tell(self, message: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                message(sink)
            except Exception as error:  # noqa: BLE001 - training outlives a full disk or a lost network
                del self._sinks[name]
                log.warning("%s failed and gets no more metrics: %r", name, error)
                with contextlib.suppress(Exception):  # likely the same failure, told above
                    sink.close()


def _on_device(name: str, value: Tensor | float) -> Tensor | float:
    """A copy that no later step changes, as a float64 scalar (exact for every smaller float), not waited for."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"metric {name!r} has shape {tuple(value.shape)}; a metric is one number: reduce it (sum, mean) first"
        )
    # a DTensor, known by its method, since naming its type would import it
    full_tensor = getattr(value.detach(), "full_tensor", None)
    whole: Tensor = value if full_tensor is None else full_tensor()
    return whole.detach().reshape(()).to(torch.float64, copy=True)


def _read(tensors: list[Tensor]) -> list[float]:
    """Values of float64 scalars, in order, with one host-device sync a device."""
    numbers = [0.0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    for indices in by_device.values():
        values = torch.stack([tensors[i] for i in indices]).tolist()  # sync
        for i, value in zip(indices, values, strict=True):
            numbers[i] = value
    return numbers
