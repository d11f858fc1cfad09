"""Experts on several ranks compute what one process computes: gradients, routing, bias, losses, checkpoints."""

import pytest
import torch

from tests.tiny import full, rows, running, tiny, tiny_model, weights
from torchtitan.config import check_tree
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.balance import AuxLoss
from torchtitan.models.layers.experts import StackedLinear
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.router import Router
from torchtitan.ops.grouped_matmul import grouped_matmul
from torchtitan.optim.clipping import global_grad_norm
from torchtitan.parallel.expert import AllToAll, _AllToAll

MESHES = [  # (ranks, dp_replicate, dp_shard, ep)
    (2, 1, 2, 1),
    (2, 1, 2, 2),
    (4, 1, 4, 2),
    (4, 1, 4, 4),
    (4, 2, 2, 2),
]


def moe_model(scope="sequence", n_experts=8, top_k=2, normalize=True, **changes):
    return tiny_model(
        feed_forward=MoE.Config(
            n_experts=n_experts,
            ffn_dim=24,
            router=Router.Config(top_k=top_k, normalize=normalize, bias_rate=0.01),
            shared=SwiGLU.Config(ffn_dim=16),
            aux_loss=AuxLoss.Config(coefficient=0.1, scope=scope) if scope else None,
        ),
        init_std=0.2,
        **changes,
    )


def configured(folder, mesh, micro_batch_rows, model, **changes):
    config = tiny(folder, micro_batch_rows=micro_batch_rows, **changes)
    config.model = model
    parallelism = config.parallelism
    parallelism.dp_replicate, parallelism.dp_shard, parallelism.ep = mesh
    return config


def own_microbatches(trainer, batch):
    rank, local = trainer.mesh.dp_rank, 8 // trainer.mesh.dp_world_size
    own = {k: v[rank * local : (rank + 1) * local] for k, v in batch.items()}
    size = trainer.micro_batch_rows
    return [{k: v[i : i + size] for k, v in own.items()} for i in range(0, local, size)]


def gradients(folder, mesh, micro_batch_rows, model):
    """Loss, norm, gradients, start weights, and tokens per expert of one step over 8 uneven rows."""
    trainer = configured(folder, mesh, micro_batch_rows, model).build()
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


@pytest.fixture(scope="module")
def alone(rank_pool, tmp_path_factory):
    model = moe_model()
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


@pytest.mark.parametrize(
    ("settings", "world_size", "ep"),
    [
        pytest.param({"scope": None}, 2, 2, id="no auxiliary loss"),
        pytest.param({"scope": "micro_batch"}, 2, 2, id="loss over the micro-batch of all ranks"),
        pytest.param({"n_experts": 6}, 4, 2, id="FSDP pads: 3 experts on 2 ranks"),
        pytest.param({"n_experts": 3}, 4, 1, id="FSDP cuts within experts"),
        pytest.param(
            {"n_experts": 2, "top_k": 1, "normalize": False}, 4, 2, id="both cuts within a stack"
        ),
        pytest.param(
            {
                "n_layers": 3,
                "first_k_dense": 1,
                "dense_feed_forward": SwiGLU.Config(ffn_dim=40),
                "attention": GQA.Config(n_heads=2, qk_norm=RMSNorm.Config()),
                "tied": True,
            },
            2,
            2,
            id="dense first block, QK norm, tied",
        ),
    ],
)
def test_other_layers_have_the_same_gradients(ranks, tmp_path, settings, world_size, ep):
    model = moe_model(**settings)
    (expected,) = ranks(gradients, 1, tmp_path / "alone", (1, 1, 1), None, model)
    for result in ranks(gradients, world_size, tmp_path, (1, world_size, ep), None, model):
        assert_same(result, expected)


FAULTS = [
    "lost gradients of sent tokens",
    "averaged expert gradients",
    "own counts in the auxiliary loss",
    "results in the order of arrival",
]


def gradients_with_a_fault(folder, model, fault):
    with pytest.MonkeyPatch.context() as patch:
        if fault == FAULTS[0]:
            patch.setattr(_AllToAll, "backward", lambda ctx, grad: (None, None, None, None))
        elif fault == FAULTS[1]:
            patch.setattr(StackedLinear, "forward", _with_half_the_gradient)
        elif fault == FAULTS[2]:
            patch.setattr(AllToAll, "sum_over_batch", lambda self, counts: counts)
        else:
            patch.setattr("torchtitan.parallel.expert.permute", lambda rows, order, inverse: rows)
        return gradients(folder, (1, 2, 2), None, model)


def _with_half_the_gradient(self, rows, counts):
    weight = self.weight.to_local()
    return grouped_matmul(rows, (weight + weight.detach()) / 2, counts)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_a_fault(ranks, tmp_path, fault):
    model = moe_model("micro_batch")
    (expected,) = ranks(gradients, 1, tmp_path / "alone", (1, 1, 1), None, model)
    for result in ranks(gradients_with_a_fault, 2, tmp_path, model, fault):
        with pytest.raises(AssertionError):
            assert_same(result, expected)


def steps(folder, mesh, n_steps, micro_batch_rows=None):
    """Train; losses, auxiliary losses and loads of each step, and the routers' biases at the end."""
    with running(configured(folder, mesh, micro_batch_rows, moe_model(), steps=n_steps)) as trainer:
        seen, step = [], trainer.train_step

        def recording(microbatches):
            done = step(microbatches)
            names = ("moe_aux_loss", "moe_load_max", "moe_load_min", "moe_dropped_tokens")
            seen.append(
                [x.item() for x in (done.loss, done.grad_norm, *map(done.metrics.get, names))]
            )
            return done

        trainer.train_step = recording
        trainer.train()
        biases = {n: b.clone() for n, b in trainer.models["policy"].model.named_buffers()}
        return seen, biases


@pytest.mark.parametrize(
    ("world_size", "mesh", "micro_batch_rows"),
    [(2, (1, 2, 2), None), (4, (1, 4, 2), 1), (4, (2, 2, 2), None)],
)
def test_runs_have_the_same_losses_loads_and_biases(
    ranks, tmp_path, world_size, mesh, micro_batch_rows
):
    (alone,) = ranks(steps, 1, tmp_path / "alone", (1, 1, 1), 5)
    for seen, biases in ranks(steps, world_size, tmp_path, mesh, 5, micro_batch_rows):
        for step, want in zip(seen, alone[0], strict=True):
            assert step == pytest.approx(want, rel=1e-5)
            assert step[-1] == 0
        assert len(biases) == 2
        for name, bias in biases.items():
            assert torch.equal(bias, alone[1][name])
            assert bias.abs().max() > 0
            assert bias.sum().abs() < 1e-6


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, (1, 2, 2)), (1, (1, 1, 1))), ((1, (1, 1, 1)), (4, (1, 4, 2)))],
    ids=str,
)
def test_checkpoint_loads_on_another_mesh(ranks, tmp_path, saved, loaded):
    whole, _ = ranks(steps, saved[0], tmp_path / "whole", saved[1], 4)[0]
    ranks(steps, saved[0], tmp_path / "cut", saved[1], 2)
    resumed, _ = ranks(steps, loaded[0], tmp_path / "cut", loaded[1], 4)[0]
    assert len(resumed) == 2
    for step, want in zip(resumed, whole[2:], strict=True):
        assert step == pytest.approx(want, rel=1e-5)


def test_initial_weights_of_experts_do_not_depend_on_the_mesh(ranks, tmp_path, alone):
    """`assert_same` compares them; here that two experts of a stack differ, as their blocks of random numbers do."""
    _, expected = alone
    gate = expected[3]["layers.0.feed_forward.experts.gate_proj.weight"]
    assert gate.shape == (8, 24, 16)
    assert not torch.equal(gate[0], gate[1])


def test_degrees_that_cannot_work_are_refused_together():
    config = tiny("unused")
    config.model = moe_model(n_experts=6)
    config.parallelism.ep = 4
    texts = [str(problem) for problem in check_tree(config, 8)]
    assert texts == [
        "model.feed_forward.n_experts=6: does not divide by the parallelism.ep=4 ranks that share the experts; "
        "set parallelism.ep to one of [1, 2]"
    ]
    config.model = tiny_model()
    (problem,) = check_tree(config, 8)
    assert str(problem) == (
        "model.feed_forward=SwiGLU.Config: has no experts for parallelism.ep=4 ranks to share; "
        "set parallelism.ep to 1"
    )
