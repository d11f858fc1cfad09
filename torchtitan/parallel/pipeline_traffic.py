"""What a pipeline sends in a step: hidden states forwards, their gradients backwards, and what shared parameters need."""

from collections.abc import Iterator
from math import prod

from torch import Tensor

from torchtitan import torch_api
from torchtitan.models.model import Model
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.parallel.traffic import Step, Traffic


def pipeline_traffic(model: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """``B * S * D * b`` bytes for each micro-batch and boundary, in each direction; nothing between stages of one rank.

    A parameter with users in two stages travels once in each direction, as its shard: value out, gradient back.
    """
    if not isinstance(model, ModelParts):
        return
    rank, rank_of_stage = mesh.pp.get_local_rank(), model.pipeline.rank_of_stage
    shape = model.stage_shape(step.micro_batch_rows, step.seq_len // mesh.degrees.cp)
    size = prod(shape) * step.compute_itemsize
    for what, towards in (("hidden states", 1), ("gradients of hidden states", -1)):
        others = [
            stage + towards for stage in model.stages if 0 <= stage + towards < len(rank_of_stage)
        ]
        calls = step.micro_batches * sum(rank_of_stage[stage] != rank for stage in others)
        if calls:
            yield Traffic("pp", mesh.degrees.pp, "send", what, calls, calls * size)
    yield from _shared(model, mesh.degrees.pp)


def _shared(model: ModelParts, n_ranks: int) -> Iterator[Traffic]:
    own, copies = dict(model.named_parameters()), model.copies
    for copy, owner in model.shared_parameters().items():
        if owner in own and copy not in copies:
            size = _local_bytes(own[owner])
            yield Traffic("pp", n_ranks, "send", f"{owner} to its copy", 1, size)
        elif copy in copies and owner not in own:
            size = _local_bytes(copies[copy])
            yield Traffic("pp", n_ranks, "send", f"gradient of the copy {copy}", 1, size)


def _local_bytes(parameter: Tensor) -> int:
    """Bytes of this rank's part."""
    local = parameter.to_local() if isinstance(parameter, torch_api.DTensor) else parameter
    return local.nbytes
