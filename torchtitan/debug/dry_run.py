"""What a rank of a run of any size will hold and send, found by building it without memory and without the other ranks."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.models.model import Model
from torchtitan.optim.optimizer import Optimizer
from torchtitan.parallel.context_traffic import context_traffic
from torchtitan.parallel.degrees import Degrees
from torchtitan.parallel.expert_traffic import expert_traffic
from torchtitan.parallel.fsdp_traffic import fsdp_traffic
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parallelize import materialise
from torchtitan.parallel.pipeline import ModelParts, Pipeline, pipeline_picture
from torchtitan.parallel.pipeline_traffic import pipeline_traffic
from torchtitan.parallel.tensor_traffic import tensor_traffic
from torchtitan.parallel.traffic import Step, Traffic, TrafficOf

PARALLELISMS: tuple[TrafficOf, ...] = (
    pipeline_traffic,
    tensor_traffic,
    expert_traffic,
    context_traffic,
    fsdp_traffic,
)
"""What each parallelism says of its communication, in the order in which `parallelize` applies them."""

NUMBERS = ("count", "ranks", "calls", "bytes", "whole tensors", "sent")
"""Columns that hold numbers and sizes."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Parameters that a rank holds alike.

    Attributes:
        pattern: their names, with ``*`` for the number of a layer.
        count: how many.
        shape: of each, over all ranks.
        placement: how each lies on the mesh.
        local_shape: of this rank's part of each.
        local_bytes: of all of these parts.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    placement: str
    local_shape: tuple[int, ...]
    local_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank holds between steps, and sends in each.

    Attributes:
        title: which rank of which mesh, and in what type it computes.
        pipeline: the pipeline as a picture; empty without one.
        holdings: its parameters.
        memory: bytes by what they are for.
        step: the shape of a step.
        traffic: its communication in a step.
        uncounted: axes of several ranks that no row of ``traffic`` is about.
    """

    title: str
    pipeline: str
    holdings: Sequence[Holding]
    memory: dict[str, int]
    step: Step
    traffic: Sequence[Traffic]
    uncounted: Sequence[str]

    def __str__(self) -> str:
        total = sum(self.memory.values())
        sent = sum(row.sent_bytes for row in self.traffic)
        step = self.step
        micro = f"{step.micro_batches} micro-batch{'es' * (step.micro_batches > 1)}"
        parts = [
            self.title,
            *([self.pipeline] if self.pipeline else []),
            table(
                ("parameter", "count", "shape", "placement", "here", "bytes"),
                [
                    (h.pattern, h.count, h.shape, h.placement, h.local_shape, _size(h.local_bytes))
                    for h in self.holdings
                ],
            ),
            table(
                ("this rank holds", "bytes"),
                [(what, _size(size)) for what, size in [*self.memory.items(), ("all", total)]],
            ),
            f"this rank sends, per step of {micro} of {step.micro_batch_rows} rows of {step.seq_len} tokens "
            "(a few scalars aside):",
            *(
                [f"not counted: what goes over {', '.join(self.uncounted)}"]
                if self.uncounted
                else []
            ),
            table(
                ("axis", "ranks", "operation", "what", "calls", "whole tensors", "sent"),
                [
                    (
                        t.axis,
                        t.ranks,
                        t.operation,
                        t.what,
                        t.calls,
                        _size(t.payload),
                        _size(t.sent_bytes),
                    )
                    for t in self.traffic
                ]
                + [("all", "", "", "", sum(t.calls for t in self.traffic), "", _size(sent))],
            )
            if self.traffic
            else "nothing",
        ]
        return "\n\n".join(parts)


@torch.no_grad()
def plan(
    *,
    rank: int,
    world_size: int,
    mesh: Mesh.Config,
    cut_model: Callable[[Mesh], Model],
    build_optimizer: Callable[[Model], Optimizer],
    step: Step,
    compute: str,
    in_backward: bool = False,
) -> Plan:
    """Build rank ``rank`` of ``world_size`` on a fake process group and say what it holds and sends.

    Args:
        rank: whose part.
        world_size: ranks of the run.
        mesh: degrees of parallelism.
        cut_model: cuts the model over a mesh, leaving its parameters on the meta device.
        build_optimizer: makes the optimizer of a model.
        step: the shape of a step.
        compute: the compute type, in words.
        in_backward: whether each parameter is updated in the backward, so that gradients do not pile up.
    """
    with fake_ranks(world_size, rank):
        built = mesh.build(torch.device("cpu"))
        model = cut_model(built)
        traffic = traffic_of(model, built, step)
        with torch_api.FakeTensorMode(allow_non_fake_inputs=True):  # shapes and types, no memory
            materialise(model, built.device)
            optimizer = build_optimizer(model)
        copies = model.copies if isinstance(model, ModelParts) else {}
        held = [*model.named_parameters(), *((f"{name} (copy)", p) for name, p in copies.items())]
        return Plan(
            title=f"rank {rank} of {built.describe()}; computes in {compute}",
            pipeline=_picture(model, mesh.pipeline, mesh.pp, step),
            holdings=holdings(held),
            memory={
                "parameters": _bytes(p for _, p in held),
                **_gradients(model, copies.values(), in_backward=in_backward),
                "optimizer state": _bytes(optimizer.state_tensors().values()),
            },
            step=step,
            traffic=traffic,
            uncounted=uncounted_axes(built.degrees, traffic),
        )


def traffic_of(model: Model, mesh: Mesh, step: Step) -> list[Traffic]:
    """What a rank sends in a step, by all that its parallelisms say of themselves."""
    return [row for parallelism in PARALLELISMS for row in parallelism(model, mesh, step)]


def uncounted_axes(degrees: Degrees, traffic: Iterable[Traffic]) -> list[str]:
    """Axes of several ranks that no row of ``traffic`` is about."""
    counted = {row.axis for row in traffic}
    return [
        axis
        for axis in ("pp", "cp", "tp", "ep")
        if getattr(degrees, axis) > 1 and axis not in counted
    ]


@contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Be one of ``world_size`` ranks whose collectives return at once and carry nothing.

    Raises:
        RuntimeError: if this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a process group exists already; a dry run makes one of its own, so start it in a fresh process"
        )
    dist.init_process_group("fake", store=torch_api.FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def holdings(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Holding]:
    """What a rank holds of ``parameters``, those of repeated layers together, in order of first appearance."""
    groups: dict[tuple[str, tuple[int, ...], str, tuple[int, ...]], list[Tensor]] = {}
    for name, parameter in parameters:
        local = _local(parameter)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        key = (pattern, tuple(parameter.shape), placement(parameter), tuple(local.shape))
        groups.setdefault(key, []).append(local)
    return [
        Holding(pattern, len(parts), shape, where, local_shape, sum(p.nbytes for p in parts))
        for (pattern, shape, where, local_shape), parts in groups.items()
    ]


def placement(parameter: Tensor) -> str:
    """How a parameter lies on the axes of more than one rank: ``fsdp=Shard(0) tp=Shard(1)``."""
    if not isinstance(parameter, torch_api.DTensor):
        return "whole"
    mesh = parameter.device_mesh
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    shown = []
    for name, ranks, where in axes:
        if ranks > 1:
            dim = getattr(where, "dim", None)  # is_shard() denies strided shards
            shown.append(f"{name}={'Replicate' if dim is None else f'Shard({dim})'}")
    return " ".join(shown) or "whole"


def _gradients(
    model: Model, copies: Iterable[nn.Parameter], *, in_backward: bool
) -> dict[str, int]:
    """Bytes of the gradients that are alive at once: all, or of the largest unit that is updated and freed as a whole.

    FSDP reduces the gradients of a unit together, into one buffer; without it each parameter is on its own.
    """
    if not in_backward:
        return {"gradients": _bytes(p for p in (*model.parameters(), *copies) if p.requires_grad)}
    found = [module for module in model.modules() if isinstance(module, torch_api.FSDPModule)]
    unit_of = {p: i for i, unit in enumerate(found) for p in unit.parameters()}
    units: dict[object, int] = defaultdict(int)  # an inner unit, which comes later, has its own
    for p in model.parameters():
        units[unit_of.get(p, p)] += _bytes([p]) if p.requires_grad else 0
    largest = "unit" if unit_of else "parameter"
    return {f"gradients of the largest {largest}": max(units.values())}


def _picture(model: Model, pipeline: Pipeline.Config, pp: int, step: Step) -> str:
    """The schedule in time; empty without a pipeline."""
    if not isinstance(model, ModelParts):
        return ""
    n_blocks = sum(map(len, model.pipeline.blocks))
    return pipeline_picture(pipeline, pp, n_blocks, step.micro_batches)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, torch_api.DTensor) else tensor


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors)


def _size(count: float) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError(count)


def table(
    header: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[str] = NUMBERS
) -> str:
    """Columns, those named in ``right`` to the right."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    to_right = {i for i, name in enumerate(header) if name in right}
    lines = (
        "  ".join(
            cell.rjust(width) if i in to_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
    return "\n".join(f"  {line}" for line in lines)
