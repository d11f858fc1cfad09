"""What FSDP2 sends in a step, from the parameters of a model that it has cut."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from torchtitan import torch_api
from torchtitan.models.model import Model
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.parallel.traffic import Step, Traffic

SHARDING_AXES = ("fsdp", "efsdp")
"""Mesh axes that FSDP shards over."""

STAGES_GATHERED = 3
"""Of a rank, that torch's schedules keep gathered at once: those that are used next."""

GRADIENT_ITEMSIZE = 4
"""Gradients are reduced in float32."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        axis: that they are sharded over.
        ranks: along it.
        replicas: copies of each shard.
        numel: elements when gathered, on this rank; with FSDP's padding, which travels too.
        trainable_numel: those among them that have a gradient.
        gathers: all-gathers in a step.
    """

    axis: str
    ranks: int
    replicas: int
    numel: int
    trainable_numel: int
    gathers: int


def fsdp_traffic(model: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """All-gathers of parameters, reduce-scatters and all-reduces of their gradients.

    With P elements, N ranks and b bytes of the compute type: ``2 * P * b * (N - 1) / N`` for each micro-batch, half of it
    for a unit that stays gathered until its backward; ``P * 4 * (N - 1) / N`` a step for the gradients; and over R replicas
    ``2 * (P / N) * 4 * (R - 1) / R`` a step.
    """
    del mesh  # the parameters know theirs
    kinds: dict[str, list[Unit]] = defaultdict(list)
    for part, uses in _parts(model, step.micro_batches):
        for kind, unit in _units(part, uses):
            kinds[kind].append(unit)
    for kind, units in kinds.items():
        first = units[0]
        trained = [unit.trainable_numel for unit in units if unit.trainable_numel]
        gradients = f"gradients of {kind}"
        if first.ranks > 1:
            gathers = sum(unit.gathers for unit in units)
            payload = step.compute_itemsize * sum(unit.gathers * unit.numel for unit in units)
            yield Traffic(
                first.axis, first.ranks, "all_gather", f"parameters of {kind}", gathers, payload
            )
            payload = sum(trained) * GRADIENT_ITEMSIZE
            yield Traffic(
                first.axis, first.ranks, "reduce_scatter", gradients, len(trained), payload
            )
        if first.replicas > 1:
            payload = sum(trained) // first.ranks * GRADIENT_ITEMSIZE
            yield Traffic(
                "dp_replicate", first.replicas, "all_reduce", gradients, len(trained), payload
            )


@dataclass(frozen=True, slots=True)
class Uses:
    """How often the units of a model, or of a stage, are gathered in a step.

    Attributes:
        freed: those that free their parameters after the forward.
        kept: the others.
    """

    freed: int
    kept: int


def _parts(model: Model, micro_batches: int) -> Iterator[tuple[Model, Uses]]:
    """The parts of a model whose units are gathered equally often: itself, or its stages."""
    if not isinstance(model, ModelParts):
        yield model, Uses(freed=2 * micro_batches, kept=micro_batches)
        return
    pipeline, pp = model.pipeline, max(model.pipeline.rank_of_stage) + 1
    line = pipeline.config.order(pp, micro_batches)[pipeline.rank_of_stage[model.stages[0]]]
    for stage, part in zip(model.stages, model.parts, strict=True):
        if pipeline.gathers_stages:
            fetched = _fetches([action.stage for action in line], stage)
            yield part, Uses(freed=fetched, kept=fetched)
        else:
            # What a backward has gathered stays for the forward after it, which frees it again. So whatever the order,
            # each action after a forward gathers, and the first one.
            yield part, Uses(freed=1 + micro_batches, kept=1)


def _fetches(stages: Sequence[int], stage: int, room: int = STAGES_GATHERED) -> int:
    """How often torch's schedules gather ``stage`` on a rank that computes ``stages`` one after another.

    Before each action it makes sure that the next ``room`` different stages are gathered, and frees the others.
    """
    active: set[int] = set()
    count = 0
    for i in range(len(stages)):
        wanted = list(dict.fromkeys(stages[i:]))[:room]
        count += stage in wanted and stage not in active
        active = set(wanted)
    return count


def _units(model: Model, uses: Uses) -> Iterator[tuple[str, Unit]]:
    """The units of ``model`` with what they are: those of its blocks are one kind."""
    blocks = {id(block) for block in model.blocks()}
    inside = {id(inner) for block in model.blocks() for inner in block.modules()} - blocks
    for name, module in model.named_modules():
        if not isinstance(module, torch_api.FSDPModule):
            continue
        parameters = list(_own_parameters(model.get_submodule(name)))
        if not parameters:
            continue
        kind = "blocks" if id(module) in blocks else name or "the rest"
        if id(module) in inside:
            kind = f"{name.rpartition('.')[2]} of blocks"
        yield kind, _unit(parameters, uses.freed if _gathers_again(module) else uses.kept)


def _unit(parameters: "Sequence[torch_api.DTensor]", gathers: int) -> Unit:
    padded = [(_padded_numel(parameter), parameter.requires_grad) for parameter in parameters]
    axis, ranks, replicas = _axes(parameters[0])
    return Unit(
        axis=axis,
        ranks=ranks,
        replicas=replicas,
        numel=sum(numel for numel, _ in padded),
        trainable_numel=sum(numel for numel, trainable in padded if trainable),
        gathers=gathers,
    )


def _own_parameters(unit: nn.Module) -> "Iterator[torch_api.DTensor]":
    """What ``unit`` gathers: the parameters in it, but for those of units inside it."""
    inner = {
        parameter
        for module in unit.modules()
        if module is not unit and isinstance(module, torch_api.FSDPModule)
        for parameter in module.parameters()
    }
    for parameter in unit.parameters():
        if parameter not in inner and isinstance(parameter, torch_api.DTensor):
            yield parameter


def _gathers_again(unit: "torch_api.FSDPModule") -> bool:
    """Whether the unit frees its parameters after its forward, so that its backward gathers them again."""
    group = unit._get_fsdp_state()._fsdp_param_group  # there is no public getter
    return group is not None and group._reshard_after_forward


def _axes(parameter: "torch_api.DTensor") -> tuple[str, int, int]:
    """The axis that FSDP shards a parameter over, ranks along it, and copies."""
    mesh = parameter.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    axis = next(name for name in SHARDING_AXES if name in sizes)
    return axis, sizes[axis], sizes.get("dp_replicate", 1)


def _padded_numel(parameter: "torch_api.DTensor") -> int:
    """Elements of a parameter as FSDP gathers it on this rank, after the other axes have cut it."""
    mesh, size = parameter.device_mesh, list(parameter.shape)
    sharded_dim, ranks = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        placement = parameter.placements[axis]
        dim, degree = getattr(placement, "dim", None), mesh.size(axis)
        if dim is None:  # not is_shard(), which denies the strided shards of FSDP over tp
            continue
        if name in SHARDING_AXES:
            sharded_dim, ranks = dim, degree
        else:
            chunk = -(-size[dim] // degree)
            size[dim] = max(0, min(chunk, size[dim] - chunk * mesh.get_local_rank(axis)))
    size[sharded_dim] = -(-size[sharded_dim] // ranks) * ranks
    return prod(size)
