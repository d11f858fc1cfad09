"""Experts on several ranks compute what one process computes: gradients, routing, bias, losses, checkpoints."""

import pytest
import torch

from tests.tiny import full, rows, tiny, tiny_model, weights
from torchtitan.models.layers.balance import AuxLoss
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.router import Router
from torchtitan.optim.clipping import global_grad_norm

MESHES = [  # (ranks, dp_replicate, dp_shard, ep)
    (2, 1, 2, 1),
    (2, 1, 2, 2),
    (4, 1, 4, 2),
    (4, 1, 4, 4),
    (4, 2, 2, 2),
]


def moe_model(scope="sequence", n_experts=8, **changes):
    return tiny_model(
        feed_forward=MoE.Config(
            n_experts=n_experts,
            ffn_dim=24,
            router=Router.Config(top_k=2, bias_rate=0.01),
            shared=SwiGLU.Config(ffn_dim=16),
            aux_loss=AuxLoss.Config(coefficient=0.1, scope=scope) if scope else None,
        ),
        init_std=0.2,
        **changes,
    )


def build(folder, mesh, micro_batch_rows, model, **changes):
    config = tiny(folder, micro_batch_rows=micro_batch_rows, **changes)
    config.model = model
    parallelism = config.parallelism
    parallelism.dp_replicate, parallelism.dp_shard, parallelism.ep = mesh
    return config.build()


def own_microbatches(trainer, batch):
    rank, local = trainer.mesh.dp_rank, 8 // trainer.mesh.dp_world_size
    own = {k: v[rank * local : (rank + 1) * local] for k, v in batch.items()}
    size = trainer.micro_batch_rows
    return [{k: v[i : i + size] for k, v in own.items()} for i in range(0, local, size)]


def gradients(folder, mesh, micro_batch_rows, model):
    """Loss, norm, gradients, start weights, and tokens per expert of one step over 8 uneven rows."""
    trainer = build(folder, mesh, micro_batch_rows, model)
    microbatches = own_microbatches(trainer, rows(8, 32, model.vocab_size))
    policy = trainer.models["policy"]
    totals = policy.engine.totals(microbatches)
    loss = policy.engine.forward_backward(microbatches, totals)
    norm = global_grad_norm(policy.model.parameters())
    grads = {name: full(p.grad) for name, p in policy.model.named_parameters()}
    layers = [m for m in policy.model.modules() if isinstance(m, MoE)]
    sums = torch.stack([trainer.mesh.sum_over_tokens(m.step_sums().clone()) for m in layers])
    return loss.total.item(), norm.item(), grads, weights(trainer), sums


def assert_same(result, expected):
    loss, norm, grads, initial, sums = result
    want_loss, want_norm, want_grads, want_initial, want_sums = expected
    for name in want_initial:
        assert torch.equal(initial[name], want_initial[name]), name
    assert torch.equal(sums[:, :-1], want_sums[:, :-1])  # routing decisions, and none dropped
    assert (sums[:, -2] == 0).all()
    torch.testing.assert_close(sums[:, -1], want_sums[:, -1], rtol=1e-6, atol=0)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        want = want_grads[name]
        assert want.norm() > 0, name
        assert (grad - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module", params=["sequence", None])
def alone(request, rank_pool, tmp_path_factory):
    model = moe_model(request.param)
    folder = tmp_path_factory.mktemp("alone")
    return model, rank_pool.run(gradients, 1, folder, (1, 1, 1), None, model)[0]


@pytest.mark.parametrize(("world_size", "replicate", "shard", "ep"), MESHES)
@pytest.mark.parametrize("micro_batch_rows", [None, 1])
def test_mesh_gives_the_same_gradients(
    ranks, tmp_path, alone, world_size, replicate, shard, ep, micro_batch_rows
):
    model, expected = alone
    mesh = (replicate, shard, ep)
    for result in ranks(gradients, world_size, tmp_path, mesh, micro_batch_rows, model):
        assert_same(result, expected)
