"""The one place that stacks the parallelisms, in order, for every model."""

from collections import defaultdict

import torch
from torch import nn

from torchtitan.models.layers.init import init_weights
from torchtitan.models.model import Model
from torchtitan.parallel.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
)
from torchtitan.parallel.compile import Compile, apply_compile
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh


def parallelize(
    config: Model.Config,
    mesh: Mesh,
    *,
    activation_checkpointing: ActivationCheckpointing.Config,
    compile: Compile.Config,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    seed: int,
    meta: bool = False,
) -> Model:
    """Build a model on the meta device, cut it, and only then give each rank memory for its part.

    Args:
        config: of the model.
        mesh: of the run.
        activation_checkpointing: what of a block's inside is kept for the backward.
        compile: how blocks are compiled.
        compute_dtype: type of matmuls and activations; parameters are kept in float32.
        reshard_after_forward: see `Mesh.Config`.
        seed: of the initial weights.
        meta: leave the parameters without memory, on the meta device.
    """
    with torch.device("meta"):
        model = config.build()
    apply_activation_checkpointing(model, activation_checkpointing)
    apply_compile(model, compile)  # after it: the graph holds the recomputation
    apply_fsdp(
        model, mesh, compute_dtype=compute_dtype, reshard_after_forward=reshard_after_forward
    )
    if not meta:
        materialise(model, mesh.device)
        init_weights(model, seed)
    return model


def materialise(model: Model, device: torch.device) -> None:
    """Give the parameters memory on ``device``; one that several modules share stays one."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[parameter].append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in users.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
