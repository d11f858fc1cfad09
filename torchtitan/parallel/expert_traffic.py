"""What expert parallelism sends in a step: tokens to their experts and back."""

from collections.abc import Iterator

import torch

from torchtitan.models.layers.moe import MoE
from torchtitan.models.model import Model
from torchtitan.parallel.activation_checkpointing import recomputation
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.parallel.traffic import Step, Traffic


def expert_traffic(model: Model, mesh: Mesh, step: Step) -> Iterator[Traffic]:
    """With T tokens a rank and k experts a token, ``4 * T * k * D * b`` for each MoE layer: there and back, twice.

    The mean over the ranks: what a rank sends back is what its experts were sent, which the router decides. A layer
    whose activations are computed again sends its tokens there and back once more. Besides, counts of tokens, 8 bytes
    an expert.
    """
    ep = mesh.ep.size()
    if ep == 1:
        return
    shards = mesh.degrees.cp * (mesh.tp.size() if mesh.sequence_parallel else 1)
    tokens = step.micro_batch_rows * step.seq_len // shards
    for part in model.parts if isinstance(model, ModelParts) else (model,):
        trips = counts = row_bytes = count_bytes = 0
        for block in part.blocks():
            again = recomputation(block) != "none"
            for layer in block.modules():
                if isinstance(layer, MoE):
                    dim, slots = layer.router.gate.in_features, layer.config.router.top_k
                    trips += 6 if again else 4
                    row_bytes += (6 if again else 4) * tokens * slots * dim * step.compute_itemsize
                    counts += 2 if again else 1
                    count_bytes += (2 if again else 1) * layer.config.n_experts
        n = step.micro_batches
        if trips:
            rows = "tokens to experts and back"
            yield Traffic("ep", ep, "all_to_all", rows, n * trips, n * row_bytes)
            size = n * count_bytes * torch.int64.itemsize
            yield Traffic("ep", ep, "all_to_all", "counts of tokens", n * counts, size)
