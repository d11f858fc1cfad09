"""Every data-parallel mesh computes what one process computes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.tiny import full, rows, running, tiny, tiny_model, train, weights
from torchtitan.errors import NumericsError
from torchtitan.optim.clipping import global_grad_norm
from torchtitan.parallel.fsdp import reshard
from torchtitan.parallel.mesh import Mesh

MESHES = [  # (ranks, dp_replicate, dp_shard)
    (2, 1, 2),
    (2, 2, 1),
    (4, 1, 4),
    (4, 4, 1),
    (4, 2, 2),
]


def gradients(folder, replicate, shard, micro_batch_rows, model, reshard_after_forward=True):
    """Loss, gradient norm and gradients of one step over 8 uneven rows, dealt to the ranks of the mesh."""
    config = tiny(folder, micro_batch_rows=micro_batch_rows)
    config.model = model
    config.parallelism.dp_replicate, config.parallelism.dp_shard = replicate, shard
    config.parallelism.reshard_after_forward = reshard_after_forward
    trainer = config.build()
    batch = rows(8, 32, config.model.vocab_size)
    mesh = trainer.mesh
    local = 8 // mesh.dp_world_size
    own = {k: v[mesh.dp_rank * local : (mesh.dp_rank + 1) * local] for k, v in batch.items()}
    size = trainer.micro_batch_rows
    microbatches = [{k: v[i : i + size] for k, v in own.items()} for i in range(0, local, size)]
    policy = trainer.models["policy"]
    totals = policy.engine.totals(microbatches)
    loss = policy.engine.forward_backward(microbatches, totals)
    norm = global_grad_norm(policy.model.parameters())
    grads = {name: full(p.grad) for name, p in policy.model.named_parameters()}
    return loss.total.item(), norm.item(), grads, weights(trainer), totals["next_token"].item()


def assert_same(result, expected):
    loss, norm, grads, initial, total = result
    want_loss, want_norm, want_grads, want_initial, want_total = expected
    assert total == want_total
    assert initial.keys() == want_initial.keys()
    for name in initial:
        assert torch.equal(initial[name], want_initial[name]), name
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    for name, grad in grads.items():
        want = want_grads[name]
        assert want.norm() > 0, name
        assert (grad - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module", params=["untied", "tied"])
def alone(request, rank_pool, tmp_path_factory):
    model = tiny_model(tied=request.param == "tied", vocab_size=4099)  # does not divide by 2 or 4
    folder = tmp_path_factory.mktemp("alone")
    return model, rank_pool.run(gradients, 1, folder, 1, 1, None, model)[0]


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 4])
def test_accumulation_gives_the_same_gradients(ranks, tmp_path, alone, micro_batch_rows):
    model, expected = alone
    (result,) = ranks(gradients, 1, tmp_path, 1, 1, micro_batch_rows, model)
    assert_same(result, expected)


@pytest.mark.parametrize(("world_size", "replicate", "shard"), MESHES)
@pytest.mark.parametrize("micro_batch_rows", [None, 1])
def test_mesh_gives_the_same_gradients(
    ranks, tmp_path, alone, world_size, replicate, shard, micro_batch_rows
):
    model, expected = alone
    results = ranks(gradients, world_size, tmp_path, replicate, shard, micro_batch_rows, model)
    for result in results:
        assert_same(result, expected)


def test_keeping_parameters_gathered_changes_nothing(ranks, tmp_path, alone):
    model, expected = alone
    for result in ranks(gradients, 2, tmp_path, 1, 2, 2, model, False):
        assert_same(result, expected)


@pytest.mark.parametrize("fault", ["own counts", "averaged gradients"])
def test_the_comparison_notices_a_fault(ranks, tmp_path, alone, fault):
    """The tests above can fail: two faults that other trainers had do not pass."""
    model, expected = alone
    for result in ranks(gradients_with_a_fault, 2, tmp_path, model, fault):
        with pytest.raises(AssertionError):
            assert_same(result, expected)


def gradients_with_a_fault(folder, model, fault):
    with pytest.MonkeyPatch.context() as patch:
        if fault == "own counts":
            patch.setattr(Mesh, "sum_over_data", lambda self, tensor: tensor)
        else:
            patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
        return gradients(folder, 1, 2, None, model)


def losses_of_a_run(folder, replicate, shard):
    config = tiny(folder, steps=6)
    config.parallelism.dp_replicate, config.parallelism.dp_shard = replicate, shard
    return train(config)[0]


@pytest.mark.parametrize(("world_size", "replicate", "shard"), [(2, 1, 2), (4, 2, 2)])
def test_whole_runs_have_the_same_losses(ranks, tmp_path, world_size, replicate, shard):
    (alone,) = ranks(losses_of_a_run, 1, tmp_path / "alone", 1, 1)
    for losses in ranks(losses_of_a_run, world_size, tmp_path / "mesh", replicate, shard):
        assert losses == pytest.approx(alone, rel=1e-5)


def run_with_a_bad_gradient(folder, bad_rank, bad_step, what):
    """Train 4 steps with a NaN or inf put in on one rank; what was raised, and whether weights moved after it."""
    trainer = tiny(folder, steps=4).build()
    engine = trainer.models["policy"].engine
    forward, before, step = engine.forward, {}, 0

    def spoiled(batch, context):
        nonlocal step
        step += 1
        sums = forward(batch, context)
        if step == bad_step:
            reshard(engine.model)
            before.update(weights(trainer))
            if dist.get_rank() == bad_rank:
                sums.losses["next_token"] = sums.losses["next_token"] * float(what)
        return sums

    engine.forward = spoiled
    try:
        trainer.train()
    except NumericsError as error:
        after = weights(trainer)
        moved = [name for name in after if not torch.equal(after[name], before[name])]
        return str(error), moved, trainer.step
    finally:
        trainer.metrics.close()
    return "nothing raised", [], trainer.step


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_a_bad_loss_on_one_rank_changes_no_weight_on_any(ranks, tmp_path, what):
    for text, moved, step in ranks(run_with_a_bad_gradient, 2, tmp_path, 1, 2, what):
        assert moved == []
        assert step == 3  # the host reads the flag one step late
        assert "step 2: loss=" in text
        assert "the loss of rank 1 was not finite" in text
        assert "newest checkpoint: none" in text


def bfloat16_step(folder):
    config = tiny(folder, steps=3, compute_dtype="bfloat16")
    losses, final = train(config)
    with running(tiny(folder + "-again", compute_dtype="bfloat16")) as trainer:
        policy = trainer.models["policy"]
        batch = rows(8 // trainer.mesh.dp_world_size, 32, config.model.vocab_size)
        totals = policy.engine.totals([batch])
        hidden = policy.model(*(batch[name] for name in policy.model.batch_fields))
        policy.engine.forward_backward([batch], totals)
        types = {p.dtype for p in policy.model.parameters()}
        grads = {p.grad.dtype for p in policy.model.parameters()}
        return losses, {w.dtype for w in final.values()}, types, grads, hidden.dtype


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_computes_low_and_keeps_float32(ranks, tmp_path, world_size):
    (want,) = ranks(losses_of_a_run, 1, tmp_path / "float32", 1, 1)
    for losses, final, types, grads, hidden in ranks(
        bfloat16_step, world_size, str(tmp_path / "bfloat16")
    ):
        assert final == types == grads == {torch.float32}
        assert hidden == torch.bfloat16
        assert losses == pytest.approx(want[:3], rel=2e-2)  # bf16 keeps 2 to 3 digits
        assert losses != want[:3]
