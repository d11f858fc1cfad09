"""Experts together with other parallelisms compute what one process computes."""

import dataclasses

import pytest
import torch

from tests.distributed.test_expert_parallel import moe_model
from tests.tiny import full, rows, running, tiny
from torchtitan.config import check_tree
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.parallel.context import cut
from torchtitan.parallel.pipeline import Pipeline

READINGS = ("moe_aux_loss", "moe_load_max", "moe_load_min", "moe_dropped_tokens")


def model(first_k_dense=0, scope="sequence"):
    dense = SwiGLU.Config(ffn_dim=40) if first_k_dense else None
    made = moe_model(scope, n_layers=4, first_k_dense=first_k_dense, dense_feed_forward=dense)
    made.feed_forward = dataclasses.replace(made.feed_forward, log_experts=True)
    return made


def steps_of(folder, model, degrees, world_size, micro_batch_rows=1, n_steps=3):
    """Numbers of each step, the first step's gradients, the initial weights and the biases at the end, of this rank.

    With several rows in a micro-batch they are those that as many data ranks have in one: first of each, second of each.
    """
    config = tiny(folder, micro_batch_rows=micro_batch_rows, max_grad_norm=None)
    config.model = model
    config.parallelism = dataclasses.replace(config.parallelism, **degrees)
    assert check_tree(config, world_size) == []
    with running(config) as trainer:
        mesh, policy = trainer.mesh, trainer.models["policy"]
        initial = {name: full(p) for name, p in policy.model.named_parameters()}
        numbers, grads, zero_grad = [], {}, policy.optimizer.zero_grad

        def keep_gradients():
            if not grads:
                grads.update({name: full(p.grad) for name, p in policy.model.named_parameters()})
            zero_grad()

        policy.optimizer.zero_grad = keep_gradients
        for step in range(n_steps):
            n, size = 8 // mesh.dp_world_size, trainer.micro_batch_rows
            batch = rows(8, 32, model.vocab_size, seed=step)
            order = torch.arange(8).view(micro_batch_rows, -1).t().flatten()
            batch = cut({k: v[order] for k, v in batch.items()}, mesh.cp, mesh.context.kind)
            own = {k: v[mesh.dp_rank * n : (mesh.dp_rank + 1) * n] for k, v in batch.items()}
            done = trainer.train_step([
                {k: v[i : i + size] for k, v in own.items()} for i in range(0, n, size)
            ])  # fmt: skip
            tokens = {k: v.item() for k, v in done.metrics.items() if k.startswith("moe_tokens.")}
            assert len(tokens) == 8 * (4 - model.first_k_dense)
            readings = [done.metrics[name].item() for name in READINGS if name in done.metrics]
            numbers.append(([done.loss.item(), done.grad_norm.item(), *readings], tokens))
        biases = {name: bias.clone() for name, bias in policy.model.named_buffers()}
        return numbers, grads, initial, biases


def assert_same(results, expected):
    want_numbers, want_grads, want_initial, want_biases = expected
    for numbers, *_ in results:
        for (found, tokens), (want, want_tokens) in zip(numbers, want_numbers, strict=True):
            assert found == pytest.approx(want, rel=1e-5)
            assert tokens == want_tokens
    together = [{k: v for r in results for k, v in r[i].items()} for i in (1, 2, 3)]
    for found, want in zip(together, (want_grads, want_initial, want_biases), strict=True):
        assert found.keys() == want.keys()
    for result in results:
        for name, grad in result[1].items():
            want = want_grads[name]
            assert (grad - want).norm() / want.norm() < 1e-5, name
        assert all(torch.equal(p, want_initial[name]) for name, p in result[2].items())
        assert all(torch.equal(b, want_biases[name]) for name, b in result[3].items())


@pytest.mark.parametrize(
    ("settings", "world_size", "degrees"),
    [
        pytest.param({}, 2, {"cp": 2, "ep": 2}, id="ep over cp"),
        pytest.param({"scope": "micro_batch"}, 4, {"cp": 2, "dp_shard": 2, "ep": 4}, id="ep over cp and dp"),
        pytest.param({}, 4, {"pp": 2, "dp_shard": 2, "ep": 2, "pipeline": Pipeline.Config(schedule="1F1B")}, id="pp"),
        pytest.param({"first_k_dense": 2}, 2, {"pp": 2, "pipeline": Pipeline.Config(schedule="1F1B")}, id="a stage without experts"),
        pytest.param({}, 4, {"pp": 2, "dp_shard": 2, "ep": 2, "pipeline": Pipeline.Config(schedule="ZBVZeroBubble")}, id="zero bubble"),
    ],
)  # fmt: skip
def test_composition_equals_one_process(ranks, tmp_path, settings, world_size, degrees):
    made = model(**settings)
    # A micro-batch is one row of each data rank.
    rows_of_one = degrees.get("dp_shard", 1) if settings.get("scope") == "micro_batch" else 1
    (expected,) = ranks(steps_of, 1, tmp_path / "alone", made, {}, 1, rows_of_one, timeout_s=300)
    results = ranks(steps_of, world_size, tmp_path, made, degrees, world_size, timeout_s=300)
    assert_same(results, expected)
