"""Data parallelism: FSDP2, HSDP and replication by one mechanism."""

from collections.abc import Iterator
from math import prod

import torch
from torch import nn

from torchtitan import torch_api
from torchtitan.models.model import Model
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.traffic import Step, Traffic


def apply_fsdp(
    model: Model, mesh: Mesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard the parameters of ``model`` in place over the mesh: one unit a block, one an edge unit, one for the rest.

    The same path at every degree: one rank is a mesh of one, and ``dp_shard=1`` with ``dp_replicate>1`` is what DDP
    does. Gradients come out as *sums* over the data ranks (the losses are already divided by the global count), in
    float32.

    Args:
        model: on the meta device.
        mesh: whose ``fsdp`` axes are (dp_replicate, dp_shard).
        compute_dtype: type of the gathered parameters and the activations; the shards stay float32.
        reshard_after_forward: free a block's gathered parameters until its backward.
    """
    policy = torch_api.MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # RoPE's tables stay float32
    )
    blocks = list(model.blocks())
    for unit in [*blocks, *model.edge_units()]:
        # What runs last in the forward is needed first in the backward: gathering it again would be waste.
        last = unit is model.head or unit is blocks[-1]
        torch_api.fully_shard(
            unit,
            mesh=mesh.fsdp,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward and not last,
        )
    torch_api.fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    for unit in fsdp_units(model):
        unit.set_gradient_divide_factor(1.0)
        if mesh.device.type == "cpu":
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def fsdp_units(model: nn.Module) -> "list[torch_api.FSDPModule]":
    """The modules of ``model`` that gather their parameters together."""
    return [m for m in model.modules() if isinstance(m, torch_api.FSDPModule)]


def set_gradient_sync(model: nn.Module, *, last_microbatch: bool) -> None:
    """Reduce gradients over the ranks in the next backward only if it is the step's last.

    FSDP still takes each backward for the last of its forward (``set_is_last_backward``): otherwise it remembers the
    forward order of the micro-batches before, and prefetches the head after the embedding's backward.
    """
    for unit in fsdp_units(model):
        unit.set_requires_gradient_sync(last_microbatch, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter, so that ``model.parameters()`` are the shards (after a forward without backward)."""
    for unit in fsdp_units(model):
        unit.reshard()


FSDP_AXES = ("dp_replicate", "fsdp", "efsdp")
"""Mesh axes that this file shards or replicates over; a parameter's other axes were cut before."""


def fsdp_traffic(model: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """All-gathers of parameters, reduce-scatters and all-reduces of float32 gradients, in one optimizer step.

    ``P * (b + b) * (N - 1) / N`` a micro-batch and ``P * 4 * (N - 1) / N`` a step, with N ranks and b bytes of the compute
    type; a unit that stays gathered until its backward is gathered once. FSDP2 pads a parameter's first dimension to a
    multiple of N, and the padding travels.
    """
    del mesh  # the parameters know theirs
    for what, members in _by_kind(model).items():
        shard_axis, ranks, replicas = members[0][1]
        gathered = sum(numel * times for numel, _, times in members) * step.micro_batches
        calls = sum(times for *_, times in members) * step.micro_batches
        numel = sum(numel for numel, *_ in members)
        if ranks > 1:
            yield Traffic(
                shard_axis,
                ranks,
                "all_gather",
                f"parameters of {what}",
                calls,
                gathered * step.compute_itemsize,
            )
            yield Traffic(
                shard_axis,
                ranks,
                "reduce_scatter",
                f"gradients of {what}",
                len(members),
                4 * numel,
            )
        if replicas > 1:
            yield Traffic(
                "dp_replicate",
                replicas,
                "all_reduce",
                f"gradients of {what}",
                len(members),
                4 * numel // ranks,
            )


_Axes = tuple[str, int, int]
"""Axis that shards, ranks along it, copies."""


def _by_kind(model: Model) -> dict[str, list[tuple[int, _Axes, int]]]:
    """Units by what they are: each with its padded elements, its axes, and how often a micro-batch gathers it."""
    blocks = {id(block) for block in model.blocks()}
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(m) for block in model.blocks() for m in block.modules()}
    kinds: dict[str, list[tuple[int, _Axes, int]]] = {}
    for unit in fsdp_units(model):
        own = list(own_parameters(unit))
        if not own:
            continue
        name = names[id(unit)]
        kind = "blocks" if id(unit) in blocks else name or "the rest"
        if id(unit) in inside - blocks:
            kind = f"{name.rpartition('.')[2]} in blocks"
        numels, axes = zip(*(_padded(parameter) for parameter in own), strict=True)
        kinds.setdefault(kind, []).append((sum(numels), axes[0], 1 + gathers_again(unit)))
    return kinds


def own_parameters(unit: nn.Module) -> "Iterator[torch_api.DTensor]":
    """The parameters that ``unit`` gathers: its own and its children's, but not those of units inside it."""
    inner = {p for m in unit.modules() if m is not unit and isinstance(m, torch_api.FSDPModule) for p in m.parameters()}
    return (p for p in unit.parameters() if p not in inner and isinstance(p, torch_api.DTensor))


def gathers_again(unit: "torch_api.FSDPModule") -> bool:
    """Whether the unit frees its parameters after its forward, so that its backward gathers them again."""
    group = unit._get_fsdp_state()._fsdp_param_group  # there is no public getter
    return group is not None and group._reshard_after_forward


def _padded(parameter: "torch_api.DTensor") -> tuple[int, _Axes]:
    """Elements of the parameter as FSDP gathers it on this rank, and its axes."""
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    size = list(parameter.shape)
    shard_axis, ranks, replicas, sharded_dim = "fsdp", 1, 1, 0
    for axis, name in enumerate(names):
        placement = parameter.placements[axis]
        dim = placement.dim if placement.is_shard() else None  # pyright: ignore[reportAttributeAccessIssue] - a Shard
        if name == "dp_replicate":
            replicas = mesh.size(axis)
        elif name in FSDP_AXES:
            shard_axis, ranks, sharded_dim = name, mesh.size(axis), dim or 0
        elif dim is not None:
            chunk = -(-size[dim] // mesh.size(axis))
            size[dim] = max(0, min(chunk, size[dim] - chunk * mesh.get_local_rank(axis)))
    size[sharded_dim] = -(-size[sharded_dim] // ranks) * ranks
    return prod(size), (shard_axis, ranks, replicas)
