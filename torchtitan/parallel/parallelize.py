"""The one place that stacks the parallelisms, in order, for every model."""

from collections import defaultdict

import torch
from torch import nn

from torchtitan.models.layers.init import init_weights
from torchtitan.models.model import Model
from torchtitan.parallel.context import apply_context_parallel
from torchtitan.parallel.expert import apply_expert_parallel
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts, Pipeline


def parallelize(
    config: Model.Config,
    mesh: Mesh,
    *,
    pipeline: Pipeline.Config,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    seed: int,
) -> Model:
    """Build a model on the meta device, cut it, and only then give each rank memory for its part.

    A pipeline cuts first, and each of its stages goes through the same.

    Args:
        config: of the model.
        mesh: of the run.
        pipeline: how the model is cut into stages.
        compute_dtype: type of matmuls and activations; parameters are kept in float32.
        reshard_after_forward: see `Mesh.Config`.
        seed: of the initial weights.
    """
    with torch.device("meta"):
        whole = config.build()
    if mesh.degrees.pp == 1:
        return _parallelize_stage(
            whole,
            mesh,
            compute_dtype=compute_dtype,
            reshard_after_forward=reshard_after_forward,
            seed=seed,
        )
    cut = pipeline.build(pp=mesh.degrees.pp, n_blocks=len(whole.blocks()))
    stages = cut.stages_of(mesh.pp.get_local_rank())
    parts = []
    for stage in stages:
        with torch.device("meta"):
            part = config.build()
        part.keep(cut.blocks[stage], stage == 0, stage == cut.n_stages - 1)
        _parallelize_stage(
            part,
            mesh,
            compute_dtype=compute_dtype,
            reshard_after_forward=reshard_after_forward and not cut.gathers_stages,
            seed=seed,
        )
        parts.append(part)
    return ModelParts(whole, parts, stages, cut, mesh.pp, dtype=compute_dtype)


def _parallelize_stage(
    model: Model,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    seed: int,
) -> Model:
    """Cut a model or one stage of it, which is on the meta device, in place, and fill this rank's part."""
    apply_expert_parallel(model, mesh)
    apply_context_parallel(model, mesh.cp, mesh.context.kind)
    apply_fsdp(
        model, mesh, compute_dtype=compute_dtype, reshard_after_forward=reshard_after_forward
    )
    _materialise(model, mesh.device)
    init_weights(model, seed)
    return model


def _materialise(model: Model, device: torch.device) -> None:
    """Give the parameters memory on ``device``; one that several modules share stays one."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[parameter].append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in users.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
