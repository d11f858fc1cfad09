"""A pipeline of any schedule computes what one process computes."""

import pytest
import torch

from tests.tiny import full, rows, tiny, tiny_model
from torchtitan.optim.clipping import global_grad_norm
from torchtitan.parallel.pipeline import Pipeline

VOCAB = 4099  # does not divide by 2 or 4


def configure(folder, pipeline, *, model, pp=1, dp_shard=1, micro_batch_rows=1, **training):
    config = tiny(folder, micro_batch_rows=micro_batch_rows, **training)
    config.model = model
    config.parallelism.pp, config.parallelism.dp_shard = pp, dp_shard
    config.parallelism.pipeline = pipeline
    return config


def steps_of(folder, pipeline, n_steps=3, **options):
    """Loss and gradient norm of each step, the first step's gradients and the initial weights of this rank."""
    trainer = configure(folder, pipeline, **options).build()
    mesh, policy = trainer.mesh, trainer.models["policy"]
    losses, grads = [], {}
    initial = {name: full(p) for name, p in policy.model.named_parameters()}
    clip = policy.optimizer.zero_grad

    def keep_gradients():
        if not grads:
            grads.update({name: full(p.grad) for name, p in policy.model.named_parameters()})
        clip()

    policy.optimizer.zero_grad = keep_gradients
    trainer.config.training.max_grad_norm = None
    for step in range(n_steps):
        batch = rows(8, 32, trainer.config.model.vocab_size, seed=step)
        local = 8 // mesh.dp_world_size
        own = {k: v[mesh.dp_rank * local : (mesh.dp_rank + 1) * local] for k, v in batch.items()}
        size = trainer.micro_batch_rows
        done = trainer.train_step(
            [{k: v[i : i + size] for k, v in own.items()} for i in range(0, local, size)]
        )
        losses.append((done.loss.item(), done.grad_norm.item()))
    return losses, grads, initial


def merged(results):
    """Losses (the same on every rank), gradients and weights of all stages."""
    losses, grads, initial = results[0]
    for other_losses, other_grads, other_initial in results[1:]:
        assert other_losses == losses
        grads, initial = {**grads, **other_grads}, {**initial, **other_initial}
    return losses, grads, initial


def assert_same(results, expected):
    losses, grads, initial = merged(results)
    want_losses, want_grads, want_initial = expected
    assert initial.keys() == want_initial.keys() == grads.keys()
    for name in initial:
        assert torch.equal(initial[name], want_initial[name]), name
    for step, (got, want) in enumerate(zip(losses, want_losses, strict=True)):
        assert got == pytest.approx(want, rel=1e-5), step
    for name, want in want_grads.items():
        assert want.norm() > 0, name
        assert (grads[name] - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module", params=["untied", "tied"])
def alone(request, rank_pool, tmp_path_factory):
    model = tiny_model(tied=request.param == "tied", vocab_size=VOCAB, n_layers=8)
    folder = tmp_path_factory.mktemp("alone")
    (result,) = rank_pool.run(_steps, 1, folder, Pipeline.Config(), {"model": model})
    return model, result


def _steps(folder, pipeline, options):
    return steps_of(folder, pipeline, **options)


SCHEDULES = [
    ("GPipe", None, 2),
    ("1F1B", None, 2),
    ("Interleaved1F1B", 2, 2),
    ("LoopedBFS", 2, 2),
    ("InterleavedZeroBubble", 1, 2),
    ("InterleavedZeroBubble", 2, 2),
    ("ZBVZeroBubble", None, 2),
    ("DualPipeV", None, 2),
    ("1F1B", None, 4),
    ("Interleaved1F1B", 2, 4),
    ("ZBVZeroBubble", None, 4),
    ("DualPipeV", None, 4),
]


@pytest.mark.parametrize(("schedule", "stages_per_rank", "pp"), SCHEDULES)
def test_schedule_gives_the_same_gradients(ranks, tmp_path, alone, schedule, stages_per_rank, pp):
    model, expected = alone
    pipeline = Pipeline.Config(schedule=schedule, stages_per_rank=stages_per_rank)
    assert_same(ranks(_steps, pp, tmp_path, pipeline, {"model": model, "pp": pp}), expected)
