"""The meshes of the large recipes, at the smallest degrees, train the debug size of the family as one process does."""

import pytest

from tests.tiny import rows, running, tiny
from torchtitan.models.llama3.sizes import llama3
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.training.feed import to_microbatches
from torchtitan_recipes.models.llama3 import (
    llama3_8b,
    llama3_8b_long_context,
    llama3_70b,
    llama3_405b,
)
from torchtitan_recipes.models.qwen3 import qwen3_30b_a3b, qwen3_235b_a22b

RECIPES = {  # (recipe, debug size, data ranks, ranks)
    "llama3_8b": (llama3_8b, llama3("debug"), 2, 2),
    "llama3_8b_long_context": (llama3_8b_long_context, llama3("debug"), 1, 2),
    "llama3_70b": (llama3_70b, llama3("debug"), 2, 4),
    "llama3_405b": (llama3_405b, llama3("debug"), 2, 8),
    "qwen3_30b_a3b": (qwen3_30b_a3b, qwen3("debug_moe"), 4, 4),
    "qwen3_235b_a22b": (qwen3_235b_a22b, qwen3("debug_moe"), 4, 4),
}


def losses(folder, name, alone):
    recipe, model, data_ranks, _ = RECIPES[name]
    config = tiny(folder, seq_len=64, global_batch_rows=8, micro_batch_rows=1 if not alone else 8)
    config.optimizer.lr = 1e-3
    config.model = model
    if not alone:
        large = recipe()
        config.activation_checkpointing = large.activation_checkpointing
        config.parallelism = large.parallelism
        config.compile = large.compile
        config.compile.backend = "aot_eager"  # its graphs; inductor's code takes minutes on a CPU
        for axis in ("tp", "pp", "cp", "ep"):
            setattr(config.parallelism, axis, min(2, getattr(config.parallelism, axis)))
        config.parallelism.dp_shard = data_ranks
    found = []
    with running(config) as trainer:
        mesh, n = trainer.mesh, 8 // trainer.mesh.dp_world_size
        for step in range(3):
            batch = rows(8, 64, config.model.vocab_size, seed=step)
            own = {k: v[mesh.dp_rank * n : (mesh.dp_rank + 1) * n] for k, v in batch.items()}
            done = trainer.train_step(to_microbatches(own, trainer.micro_batch_rows, mesh))
            found.append((done.loss.item(), done.grad_norm.item()))
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_mesh_equals_one_process(ranks, tmp_path, name):
    (want,) = ranks(losses, 1, tmp_path, name, True)
    for result in ranks(losses, RECIPES[name][3], tmp_path, name, False, timeout_s=300):
        for got, wanted in zip(result, want, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
