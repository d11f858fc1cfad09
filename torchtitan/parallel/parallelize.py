"""The one place that stacks the parallelisms, in order, for every model."""

from collections import defaultdict
from functools import partial

import torch
from torch import nn

from torchtitan.models.layers.init import init_weights
from torchtitan.models.model import Model
from torchtitan.parallel.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
)
from torchtitan.parallel.compile import Compile, allow_backward_in_halves, apply_compile
from torchtitan.parallel.context import apply_context_parallel
from torchtitan.parallel.expert import apply_expert_parallel
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts, Pipeline, splits_backward
from torchtitan.parallel.tensor import apply_tensor_parallel, enable_async_tp


def parallelize(
    config: Model.Config,
    mesh: Mesh,
    *,
    activation_checkpointing: ActivationCheckpointing.Config,
    compile: Compile.Config,
    pipeline: Pipeline.Config,
    compute_dtype: torch.dtype,
    parameter_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool,
    seed: int,
    async_tp: bool = False,
    meta: bool = False,
) -> Model:
    """Build a model on the meta device, cut it, and only then give each rank memory for its part.

    A pipeline cuts first, and each of its stages goes through the same.

    Args:
        config: of the model.
        mesh: of the run.
        pipeline: how the model is cut into stages.
        activation_checkpointing: what of a block's inside is kept for the backward.
        compile: how blocks are compiled.
        compute_dtype: type of matmuls and activations.
        parameter_dtype: type in which parameters are kept between steps.
        reshard_after_forward: see `Mesh.Config`.
        seed: of the initial weights.
        async_tp: see `Mesh.Config`.
        meta: leave the parameters without memory, on the meta device.
    """
    if async_tp and not meta:
        enable_async_tp(mesh.tp)
    with torch.device("meta"):
        whole = config.build()
    finish = partial(
        _parallelize_stage,
        mesh=mesh,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        compute_dtype=compute_dtype,
        parameter_dtype=parameter_dtype,
        seed=seed,
        meta=meta,
    )
    if mesh.degrees.pp == 1:
        return finish(whole, reshard_after_forward=reshard_after_forward)
    if compile.enabled and splits_backward(pipeline):
        allow_backward_in_halves()
    cut = pipeline.build(pp=mesh.degrees.pp, n_blocks=len(whole.blocks()))
    stages = cut.stages_of(mesh.pp.get_local_rank())
    parts = []
    for stage in stages:
        with torch.device("meta"):
            part = config.build()
        part.keep(cut.blocks[stage], stage == 0, stage == cut.n_stages - 1)
        finish(part, reshard_after_forward=reshard_after_forward and not cut.gathers_stages)
        parts.append(part)
    return ModelParts(
        whole,
        parts,
        stages,
        cut,
        mesh.pp,
        dtype=compute_dtype,
        sequence_shards=mesh.tp.size() if mesh.sequence_parallel else 1,
    )


def _parallelize_stage(
    model: Model,
    *,
    mesh: Mesh,
    activation_checkpointing: ActivationCheckpointing.Config,
    compile: Compile.Config,
    compute_dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    reshard_after_forward: bool,
    seed: int,
    meta: bool,
) -> Model:
    """Cut a model or one stage of it, which is on the meta device, in place, and fill this rank's part."""
    for parameter in model.parameters():  # buffers are the modules' own matter
        parameter.data = parameter.data.to(parameter_dtype)
    apply_tensor_parallel(model, mesh.tp, sequence_parallel=mesh.sequence_parallel)
    apply_expert_parallel(model, mesh)
    apply_context_parallel(model, mesh.cp, mesh.context.kind)
    apply_activation_checkpointing(model, activation_checkpointing)
    budget = activation_checkpointing.compiled_budget
    apply_compile(
        model, compile, memory_budget=budget
    )  # after it: the graph holds the recomputation
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
