"""The check of the closed form: steps on fake tensors with every allocation counted, on a few layers, extrapolated."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.batch import Batch
from torchtitan.debug.dry_run import fake_ranks
from torchtitan.errors import ConfigError
from torchtitan.models.model import Model
from torchtitan.optim.clipping import Clip
from torchtitan.optim.updates import make_updates
from torchtitan.parallel.parallelize import materialise
from torchtitan.planner.devices import GIB
from torchtitan.planner.memory import plan_memory
from torchtitan.planner.tracker import MemoryTracker, WithoutValues
from torchtitan.trainer import Trainer, cut_model
from torchtitan.training.engine import Engine
from torchtitan.training.settings import Training

LAYERS = (2, 4)
"""Numbers of layers that are tracked."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """A model of a few layers: what was counted, and what the closed form says of it.

    Attributes:
        layers: how many.
        planned: bytes by the closed form, without overhead, with the kernels of a CPU.
        counted: bytes by phase.
    """

    layers: int
    planned: int
    counted: dict[str, int]

    @property
    def peak(self) -> int:
        """Most bytes of all phases."""
        return max(self.counted.values())


@dataclass(frozen=True, slots=True)
class Verification:
    """The closed form against the count.

    Attributes:
        tracked: on a few layers.
        layers: of the whole model.
        planned: bytes of the whole by the closed form.
        extrapolated: bytes of the whole, each phase's count continued as a line.
    """

    tracked: tuple[Tracked, ...]
    layers: int
    planned: int
    extrapolated: int

    @property
    def error(self) -> float:
        """Of the closed form for the whole model, as a part of the count."""
        return self.planned / self.extrapolated - 1

    def __str__(self) -> str:
        lines = [
            "closed form against tensors counted on fake ranks, without overhead, kernels of a CPU:"
        ]
        rows = [(t.layers, t.planned, t.peak, "counted") for t in self.tracked]
        rows.append((self.layers, self.planned, self.extrapolated, "extrapolated"))
        for layers, planned, counted, how in rows:
            lines.append(
                f"  {layers} layers: {planned / GIB:.2f} GiB planned, {counted / GIB:.2f} GiB {how} "
                f"({100 * (planned / counted - 1):+.1f} %)"
            )
        return "\n".join(lines)


def verify(config: Trainer.Config, world_size: int) -> Verification:
    """Track rank 0 on `LAYERS` layers and continue the counts as lines.

    Raises:
        ConfigError: if the run cannot be tracked in one process without values.
    """
    degrees = config.parallelism.resolve(world_size)
    if degrees.pp > 1 or degrees.ep > 1:
        raise ConfigError(
            f"--verify: pp={degrees.pp} and ep={degrees.ep} need other ranks' values; verify the run with both at 1 "
            "(--parallelism.pp 1 --parallelism.ep 1)"
        )
    if config.compile.enabled:
        raise ConfigError(
            "--verify: compile.enabled=True hides allocations from the count; add --compile.enabled False"
        )
    layers = config.model.n_blocks
    counts = sorted({min(n, layers) for n in LAYERS})
    tracked = tuple(_tracked(config, world_size, n) for n in counts)
    planned = plan_tracked(config, world_size)
    return Verification(tracked, layers, planned, _extrapolated(tracked, layers))


def _extrapolated(tracked: tuple[Tracked, ...], layers: int) -> int:
    first, last = tracked[0], tracked[-1]
    if first is last:
        return first.peak
    steps = (layers - last.layers) / (last.layers - first.layers)
    phases = first.counted.keys() & last.counted.keys()
    return max(int(last.counted[p] + steps * (last.counted[p] - first.counted[p])) for p in phases)


def _tracked(config: Trainer.Config, world_size: int, layers: int) -> Tracked:
    small: Any = copy.deepcopy(config)
    if not hasattr(small.model, "n_layers"):
        raise ConfigError(
            f"--verify: model {type(small.model).__qualname__} has no n_layers to shorten; leave --verify out"
        )
    small.model.n_layers = layers
    return Tracked(layers, plan_tracked(small, world_size), track(small, world_size))


def plan_tracked(config: Trainer.Config, world_size: int) -> int:
    """Bytes by the closed form of what `track` counts: kernels of a CPU, the compute type of a GPU, no packed rows."""
    tracked = copy.deepcopy(config)
    tracked.training.compute_dtype = str(_compute_dtype(config)).removeprefix("torch.")  # pyright: ignore[reportAttributeAccessIssue] - one of the choices
    return plan_memory(tracked, world_size, gpu=False, packed=False).peak.total


def _compute_dtype(config: Trainer.Config) -> torch.dtype:
    return Training.compute_dtype(config.training, torch.device("cuda"))


def track(config: Trainer.Config, world_size: int) -> dict[str, int]:
    """Most bytes of rank 0 in each phase of a step on fake tensors: nothing is computed or sent."""
    training, dtype = config.training, _compute_dtype(config)
    with fake_ranks(world_size, 0):
        mesh = config.parallelism.build(torch.device("cpu"))
        model = cut_model(config, mesh, dtype, meta=True)
        rows = training.global_batch_rows // mesh.dp_world_size
        micro_rows = training.micro_batch_rows or rows
        shape = micro_rows, training.seq_len // mesh.degrees.cp
        with torch_api.FakeTensorMode(allow_non_fake_inputs=True), WithoutValues():
            materialise(model, mesh.device)
            step = _Step(config, model, Engine(model, config.objective.build(), mesh))
            step.run(
                rows // micro_rows, shape
            )  # DTensor's first dispatches make tensors of global shape
            tracker = MemoryTracker([*model.parameters(), *step.optimizer.state_tensors().values()])
            with tracker, phases(model, tracker):
                step.run(rows // micro_rows, shape)
    return tracker.peaks


class _Step:
    """A training step as the Trainer takes it, without data."""

    def __init__(self, config: Trainer.Config, model: Model, engine: Engine) -> None:
        self.engine = engine
        self.optimizer = config.optimizer.build(model.named_parameters(), model.names_elsewhere())
        self.updates = make_updates(
            self.optimizer,
            Clip(config.training.max_grad_norm, config.training.clip_by),
            in_backward=config.optimizer.in_backward,
        )

    def run(self, micro_batches: int, shape: tuple[int, int]) -> None:
        batches = [_batch(shape) for _ in range(micro_batches)]
        totals = self.engine.totals(batches)
        self.updates.begin(torch.zeros(()))
        self.engine.forward_backward(batches, totals)
        self.updates.clip()
        self.updates.finish(torch.zeros(()))
        self.optimizer.zero_grad()


def _batch(shape: tuple[int, int]) -> Batch:
    names = ("tokens", "labels", "positions")
    batch: Any = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
    batch["document_ids"] = None  # where documents lie is a value
    return batch


@contextmanager
def phases(model: Model, tracker: MemoryTracker) -> Iterator[None]:
    """Let ``tracker`` know where a step is: forward, loss, each block's backward, update."""
    tracker.enter_phase("forward")
    blocks = list(model.blocks())
    names = ["backward of the first block", *["backward between"] * (len(blocks) - 2)]
    names = [*names, "backward of the last block"][-len(blocks) :]

    def when_gradient_comes(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: tracker.enter_phase(name))

        return hook

    handles = [
        block.register_forward_hook(when_gradient_comes(name))
        for block, name in zip(blocks, names, strict=True)
    ]

    def first_input(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda _: tracker.enter_phase("update"))

    handles.append(blocks[0].register_forward_pre_hook(first_input))
    handles.append(
        model.head.register_forward_pre_hook(lambda module, args: tracker.enter_phase("loss"))
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
