"""Tensor, sequence and loss parallel compute what one process computes."""

import pytest
import torch

from tests.tiny import full, rows, tiny, tiny_model, weights
from torchtitan.models.layers.attention import GQA
from torchtitan.optim.clipping import global_grad_norm


def model_of(**changes):
    """Heads for up to 4 tp ranks; a vocabulary that neither 2 nor 4 divide."""
    heads = GQA.Config(n_heads=8, n_kv_heads=4)
    return tiny_model(**{"dim": 32, "attention": heads, "vocab_size": 4099, **changes})


def gradients(folder, tp, shard, sequence_parallel, micro_batch_rows, model):
    """Loss, gradient norm, gradients and weights of one step over 8 uneven rows."""
    config = tiny(folder, micro_batch_rows=micro_batch_rows)
    config.model = model
    config.parallelism.tp, config.parallelism.dp_shard = tp, shard
    config.parallelism.sequence_parallel = sequence_parallel
    trainer = config.build()
    mesh, policy = trainer.mesh, trainer.models["policy"]
    batch = rows(8, 32, config.model.vocab_size)
    local = 8 // mesh.dp_world_size
    own = {k: v[mesh.dp_rank * local : (mesh.dp_rank + 1) * local] for k, v in batch.items()}
    size = trainer.micro_batch_rows
    microbatches = [{k: v[i : i + size] for k, v in own.items()} for i in range(0, local, size)]
    totals = policy.engine.totals(microbatches)
    loss = policy.engine.forward_backward(microbatches, totals)
    norm = global_grad_norm(policy.model.parameters())
    grads = {name: full(p.grad) for name, p in policy.model.named_parameters()}
    return loss.total.item(), norm.item(), grads, weights(trainer)


def assert_same(result, expected):
    loss, norm, grads, initial = result
    want_loss, want_norm, want_grads, want_initial = expected
    assert initial.keys() == want_initial.keys()
    assert all(torch.equal(initial[name], want_initial[name]) for name in initial)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    for name, grad in grads.items():
        want = want_grads[name]
        assert want.norm() > 0, name
        assert (grad - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module", params=["untied", "tied"])
def alone(request, rank_pool, tmp_path_factory):
    model = model_of(tied=request.param == "tied")
    folder = tmp_path_factory.mktemp("alone")
    return model, rank_pool.run(gradients, 1, folder, 1, 1, True, None, model)[0]


@pytest.mark.parametrize(("tp", "shard"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("micro_batch_rows", [None, 2])
def test_mesh_gives_the_same_gradients(
    ranks, tmp_path, alone, tp, shard, sequence_parallel, micro_batch_rows
):
    model, expected = alone
    for result in ranks(
        gradients, tp * shard, tmp_path, tp, shard, sequence_parallel, micro_batch_rows, model
    ):
        assert_same(result, expected)
