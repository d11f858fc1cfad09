"""Data parallelism: FSDP2, HSDP and replication by one mechanism."""

import torch
from torch import nn

from torchtitan import torch_api
from torchtitan.models.layers.experts import Experts
from torchtitan.models.layers.head import Head
from torchtitan.models.model import Model
from torchtitan.parallel.mesh import Mesh


def apply_fsdp(
    model: Model, mesh: Mesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard the parameters of ``model`` in place over the mesh: one unit a block, one an edge unit, one for the rest.

    A block's experts are a unit of their own inside it, over the ranks that expert parallelism leaves.

    The same path at every degree, ``dp_shard=1`` with ``dp_replicate>1`` being what DDP does; only a run of one rank
    in float32 is left as it is, since there FSDP would but copy (4 % of a step of the debug model). Gradients come out as *sums* over the data ranks (the losses are already divided by the global count), in
    float32.

    Args:
        model: on the meta device.
        mesh: whose ``fsdp`` and ``expert_fsdp`` are (dp_replicate, ranks to shard over).
        compute_dtype: type of the gathered parameters and the activations; the shards keep theirs.
        reshard_after_forward: free a block's gathered parameters until its backward.
    """
    types = {compute_dtype, *(parameter.dtype for parameter in model.parameters())}
    if mesh.world_size == 1 and types == {torch.float32}:
        return
    policy = torch_api.MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # RoPE's tables stay float32
    )
    blocks = list(model.blocks())
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        torch_api.fully_shard(
            experts,
            mesh=mesh.expert_fsdp,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda weight: _expert_placement(weight, mesh),
        )
    for unit in [*blocks, *model.edge_units()]:
        # What runs last in the forward is needed first in the backward: gathering it again would be waste.
        last = isinstance(unit, Head) or unit is blocks[-1]
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


def _expert_placement(weight: nn.Parameter, mesh: Mesh) -> "torch_api.Shard":
    """Where FSDP cuts a stack of experts ``(E, D_out, D_in)`` that is cut over ``ep`` already.

    Between experts if each rank gets one at least; else within them, if that comes out even: FSDP pads dim 0 alone.
    """
    ranks = mesh.degrees.efsdp
    if weight.shape[0] // mesh.degrees.ep < ranks and weight.shape[1] % ranks == 0:
        return torch_api.Shard(1)
    return torch_api.Shard(0)


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
