"""What tensor parallelism sends in a step: the residual stream, gathered and scattered or summed, and the loss's softmax."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from torchtitan import torch_api
from torchtitan.models.layers.head import Head
from torchtitan.models.layers.plan import Cut
from torchtitan.models.model import Model
from torchtitan.parallel.activation_checkpointing import recomputation
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.parallel.tensor import gradients_are_summands, module_cuts
from torchtitan.parallel.traffic import Operation, Step, Traffic

_FLOATS_PER_TOKEN = 3  # largest; sum of exponentials and target


@dataclass(frozen=True, slots=True)
class _Seams:
    """Where a part of a model enters and leaves the residual stream, in one micro-batch.

    Attributes:
        gathers: inputs that are made whole in the forward.
        sums: outputs that are added up in the forward.
        gathers_again: inputs that a recomputation makes whole once more.
        sums_again: outputs that it adds up once more.
    """

    gathers: int
    sums: int
    gathers_again: int = 0
    sums_again: int = 0


def tensor_traffic(model: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """Residual stream, loss and the gradients of parameters that each tp rank has whole.

    With T tokens of a micro-batch, width D and b bytes, ``8 * T * D * b * (tp - 1) / tp`` a block, and half of it for
    embedding and head. Nothing is stated for experts that are recomputed: how much of them is, is decided as they run.
    """
    if mesh.tp.size() == 1:
        return
    parts = model.parts if isinstance(model, ModelParts) else (model,)
    blocks = [block for part in parts for block in part.blocks()]
    if any(recomputation(b) != "none" and _has_experts(b) for b in blocks):
        return
    for part in parts:
        inside = {module for block in part.blocks() for module in block.modules()}
        edges = [(m, cut) for m, cut in module_cuts(part).values() if m not in inside]
        yield from _stream("embedding and head", _seams(edges), part, mesh, step)
        of_blocks = [_seams(list(module_cuts(b).values()), recomputation(b)) for b in part.blocks()]
        seams = _Seams(
            gathers=sum(s.gathers for s in of_blocks),
            sums=sum(s.sums for s in of_blocks),
            gathers_again=sum(s.gathers_again for s in of_blocks),
            sums_again=sum(s.sums_again for s in of_blocks),
        )
        yield from _stream("blocks", seams, part, mesh, step)
        yield from _loss(edges, mesh, step)
        yield from _gradients(part, mesh, step)


def _has_experts(block: nn.Module) -> bool:
    return any(cut.elsewhere for _, cut in module_cuts(block).values())


def _seams(cuts: list[tuple[nn.Module, Cut]], recomputed: str = "none") -> _Seams:
    gathers = sum(cut.gathers_input for _, cut in cuts)
    sums = sum(cut.sums_output for _, cut in cuts)
    return _Seams(
        gathers=gathers,
        sums=sums,
        gathers_again=0 if recomputed == "none" else gathers,
        # Selective keeps sums; a full recomputation ends before the last one, which nothing in the block needs.
        sums_again=sums - 1 if recomputed == "full" else 0,
    )


def _stream(what: str, seams: _Seams, part: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """The residual stream's rows; each seam's backward is the opposite of its forward."""
    rows, tokens, dim = part.stage_shape(step.micro_batch_rows, step.seq_len // mesh.degrees.cp)
    size = rows * tokens * dim * step.compute_itemsize
    calls: dict[Operation, int] = defaultdict(int)
    if mesh.sequence_parallel:
        both = seams.gathers + seams.sums
        calls["all_gather"] = both + seams.gathers_again
        calls["reduce_scatter"] = both + seams.sums_again
    else:
        calls["all_reduce"] = seams.gathers + seams.sums + seams.sums_again
    for operation, count in calls.items():
        count *= step.micro_batches
        if count:
            yield Traffic(
                "tp", mesh.tp.size(), operation, f"hidden states of {what}", count, count * size
            )


def _loss(edges: list[tuple[nn.Module, Cut]], mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """The softmax over the vocabulary, if every label counts; ignored ones are dropped before it."""
    tokens = step.micro_batch_rows * step.seq_len // mesh.degrees.cp
    for module, _ in edges:
        if isinstance(module, Head):
            by_tokens = module.config.weight_gradient != "by_vocabulary"
            chunks = -(-tokens // module.chunk_tokens) if by_tokens else 1
            calls = 2 * step.micro_batches * chunks
            payload = step.micro_batches * tokens * _FLOATS_PER_TOKEN * 4
            yield Traffic("tp", mesh.tp.size(), "all_reduce", "softmax of the loss", calls, payload)


def _gradients(part: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """Gradients that are summands on each rank, added up once a step: of accumulated ones in float32."""
    sizes = [
        parameter.numel()
        for module, cut in module_cuts(part).values()
        if gradients_are_summands(cut, sequence_parallel=mesh.sequence_parallel)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and _is_whole(parameter)
    ]
    itemsize = step.compute_itemsize if step.micro_batches == 1 else 4
    if sizes:
        yield Traffic(
            "tp",
            mesh.tp.size(),
            "all_reduce",
            "gradients of whole parameters",
            len(sizes),
            sum(sizes) * itemsize,
        )


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether each tp rank has all of it; tp is the last axis of a parameter's mesh."""
    return isinstance(parameter, torch_api.DTensor) and parameter.placements[-1].is_replicate()
