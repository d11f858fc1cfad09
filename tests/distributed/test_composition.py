"""Parallelisms in combination compute what one process computes: the combinations that are accepted."""

import pytest

from tests.distributed.test_expert_parallel import moe_model
from tests.tiny import full, rows, running, tiny, tiny_model
from torchtitan.config import check_tree
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.training.feed import to_microbatches

HEADS = GQA.Config(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm.Config())
MODELS = {
    "dense": tiny_model(n_layers=4, vocab_size=4099),
    "tied": tiny_model(n_layers=4, vocab_size=4099, tied=True),
    "moe": moe_model(n_layers=4),
    "heads": tiny_model(n_layers=4, vocab_size=4099, attention=HEADS),
    "tied heads": tiny_model(n_layers=4, vocab_size=4099, attention=HEADS, tied=True),
    # Without norms of queries and keys: here one process's own gradient of such a norm is 8e-6 off in float32.
    "moe heads": moe_model(n_layers=4, attention=GQA.Config(n_heads=4, n_kv_heads=2)),
}
N_STEPS = 3

GRID = [  # (model, degrees, options)
    ("dense", {"pp": 2, "dp_replicate": 2}, {}),
    ("dense", {"cp": 2, "dp_replicate": 2}, {}),
    ("dense", {"pp": 2, "cp": 2}, {}),
    ("dense", {"pp": 2, "cp": 2}, {"kind": "ring", "schedule": "Interleaved1F1B"}),
    ("tied", {"pp": 2, "cp": 2}, {"kind": "ulysses", "recompute": "full"}),
    ("dense", {"cp": 2, "dp_shard": 2}, {"recompute": "full"}),
    ("dense", {"pp": 2, "dp_shard": 2}, {"recompute": "full"}),
    ("moe", {"cp": 2, "ep": 2}, {}),
    ("moe", {"cp": 2, "dp_shard": 2, "ep": 2}, {}),
    ("moe", {"cp": 2, "dp_shard": 2, "ep": 4}, {"kind": "ring"}),
    ("moe", {"pp": 2, "dp_shard": 2}, {}),
    ("moe", {"pp": 2, "dp_shard": 2, "ep": 2}, {}),
    ("moe", {"pp": 2, "cp": 2, "ep": 2}, {}),
    ("moe", {"dp_shard": 2, "ep": 2}, {"recompute": "full"}),
    ("heads", {"tp": 2, "dp_replicate": 2}, {}),
    ("heads", {"tp": 2, "dp_shard": 2}, {"recompute": "selective", "sequence_parallel": False}),
    ("tied heads", {"tp": 2, "dp_shard": 2}, {"recompute": "full"}),
    ("heads", {"tp": 2, "cp": 2}, {}),
    ("heads", {"tp": 2, "cp": 2}, {"kind": "ring", "sequence_parallel": False}),
    ("heads", {"tp": 2, "cp": 2}, {"kind": "ulysses", "recompute": "full"}),
    ("tied heads", {"tp": 2, "pp": 2}, {}),
    ("heads", {"tp": 2, "pp": 2}, {"schedule": "Interleaved1F1B", "sequence_parallel": False}),
    ("tied heads", {"tp": 2, "pp": 2}, {"schedule": "ZBVZeroBubble", "recompute": "full"}),
    ("moe heads", {"tp": 2}, {}),
    ("moe heads", {"tp": 2, "ep": 2}, {"recompute": "full"}),
    ("moe heads", {"tp": 2, "dp_shard": 2, "ep": 2}, {}),
    ("moe heads", {"tp": 2, "dp_shard": 2, "ep": 4}, {}),
    ("moe heads", {"tp": 2, "cp": 2, "ep": 2}, {"kind": "ring"}),
    ("moe heads", {"tp": 2, "pp": 2, "ep": 2}, {}),
]


def configured(folder, model, degrees, options):
    config = tiny(folder, micro_batch_rows=2)
    config.model = MODELS[model]
    config.training.max_grad_norm = None  # the gradients are compared as they are
    config.parallelism.dp_shard = 1
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    config.parallelism.sequence_parallel = options.get("sequence_parallel", True)
    config.parallelism.context.kind = options.get("kind", "all_gather")
    config.parallelism.pipeline.schedule = options.get("schedule", "1F1B")
    if "recompute" in options:
        config.activation_checkpointing = ActivationCheckpointing.Config(mode=options["recompute"])
    return config


def world_of(degrees):
    world = 1
    for name, degree in degrees.items():
        world *= 1 if name == "ep" else degree
    return world


def steps_of(folder, model, degrees, options):
    """Loss and norm of each step, and the first step's gradients of this rank's parameters."""
    config = configured(folder, model, degrees, options)
    assert check_tree(config, world_of(degrees)) == []
    numbers, grads = [], {}
    with running(config) as trainer:
        policy, mesh = trainer.models["policy"], trainer.mesh
        zero_grad = policy.optimizer.zero_grad

        def keep_gradients():
            if not grads:
                grads.update({name: full(p.grad) for name, p in policy.model.named_parameters()})
            zero_grad()

        policy.optimizer.zero_grad = keep_gradients
        for step in range(N_STEPS):
            batch = rows(8, 32, config.model.vocab_size, seed=step)
            n = 8 // mesh.dp_world_size
            own = {k: v[mesh.dp_rank * n : (mesh.dp_rank + 1) * n] for k, v in batch.items()}
            done = trainer.train_step(to_microbatches(own, trainer.micro_batch_rows, mesh))
            numbers.append((done.loss.item(), done.grad_norm.item()))
    return numbers, grads


@pytest.fixture(scope="module")
def alone(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: rank_pool.run(steps_of, 1, folder / name, name, {}, {})[0] for name in MODELS}


@pytest.mark.parametrize(("model", "degrees", "options"), GRID, ids=str)
def test_combination_equals_one_process(ranks, tmp_path, alone, model, degrees, options):
    want_numbers, want_grads = alone[model]
    results = ranks(steps_of, world_of(degrees), tmp_path, model, degrees, options)
    grads = {}
    for numbers, own in results:
        for got, want in zip(numbers, want_numbers, strict=True):
            assert got == pytest.approx(want, rel=1e-5)
        grads |= own
    assert grads.keys() == want_grads.keys()
    for name, want in want_grads.items():
        assert want.norm() > 0, name
        assert (grads[name] - want).norm() / want.norm() < 1e-5, name
