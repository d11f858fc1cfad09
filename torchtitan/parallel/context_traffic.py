"""What context parallelism sends in a step: keys and values, or heads, of each attention layer."""

import math
from collections import Counter
from collections.abc import Iterator

import torch

from torchtitan.models.layers.attention import GQA
from torchtitan.models.model import Model
from torchtitan.parallel.activation_checkpointing import recomputation
from torchtitan.parallel.context import Blockwise, ContextAttention
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.parallel.traffic import Operation, Step, Traffic


def context_traffic(model: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """Keys and values of each layer and micro-batch, by kind, and document ids once a forward.

    For B rows of S tokens, c ranks, K key heads a rank and b bytes:

    - ``all_gather``: ``B * S * K * 2 * Dh * b`` gathered, again in the backward, and their gradients scattered in
      float32;
    - ``ring``: the same in ``c - 1`` sends each;
    - ``ulysses``: queries, keys, values and output, ``B * S / c * H * Dh * b`` each, through an all-to-all, and back.

    Nothing is stated for attention that is no `GQA`.
    """
    cp = mesh.cp.size()
    if cp == 1:
        return
    for part in model.parts if isinstance(model, ModelParts) else (model,):
        sent: Counter[tuple[Operation, str]] = Counter()  # bytes of a micro-batch
        calls: Counter[tuple[Operation, str]] = Counter()
        attends = False
        for block in part.blocks():
            for layer in block.modules():
                if isinstance(layer, GQA) and isinstance(layer.inner, ContextAttention):
                    attends = True
                    again = recomputation(block) == "full"
                    for operation, what, count, size in _layer(layer, mesh, step, again=again):
                        calls[operation, what] += count
                        sent[operation, what] += count * size
        if attends:
            rows = step.micro_batch_rows * step.seq_len
            calls["all_gather", "document ids"] = 1
            sent["all_gather", "document ids"] = rows * torch.int64.itemsize
        for (operation, what), count in calls.items():
            n = step.micro_batches
            yield Traffic("cp", cp, operation, what, n * count, n * sent[operation, what])


def _layer(
    layer: GQA, mesh: Mesh, step: Step, *, again: bool
) -> Iterator[tuple[Operation, str, int, int]]:
    """Operation, data, calls and bytes of each for one layer and micro-batch; ``again`` if its forward runs twice."""
    cp, tp, b = mesh.cp.size(), mesh.tp.size(), step.compute_itemsize
    heads, kv_heads = (p.out_features // tp // layer.head_dim for p in (layer.q_proj, layer.k_proj))
    row = step.micro_batch_rows * step.seq_len * layer.head_dim  # elements of one head
    forwards = 2 if again else 1
    if isinstance(layer.inner, Blockwise) and layer.inner.layout.kind == "ring":
        part = row // cp * 2 * kv_heads
        yield "send", "keys and values", (forwards + 1) * (cp - 1), part * b
        yield "send", "gradients of keys and values", cp - 1, part * 4
    elif isinstance(layer.inner, Blockwise):
        yield "all_gather", "keys and values", forwards + 1, row * 2 * kv_heads * b
        yield "reduce_scatter", "gradients of keys and values", 1, row * 2 * kv_heads * 4
    else:
        dealt = math.lcm(kv_heads, cp)
        yield "all_to_all", "queries and output", 2 * (forwards + 1), row // cp * heads * b
        yield "all_to_all", "keys and values by head", 2 * (forwards + 1), row // cp * dealt * b
