"""Runs whose parameters are updated in the backward."""

import pytest
import torch

from tests.tiny import running, tiny, tiny_model, train
from torchtitan.errors import NumericsError


def early(config):
    """The same run, updated in the backward."""
    config.optimizer.in_backward = True
    return config


def config_of(folder, **training):
    config = tiny(folder, clip_by="parameter", **training)
    config.model = tiny_model(tied=True)
    return config


def test_the_same_run_bit_for_bit_and_a_switch_at_a_checkpoint(tmp_path):
    losses, weights = train(config_of(tmp_path / "plain", steps=4))
    early_losses, early_weights = train(early(config_of(tmp_path / "early", steps=4)))
    first, _ = train(early(config_of(tmp_path / "switched", steps=2)))
    second, switched_weights = train(config_of(tmp_path / "switched", steps=3))
    third, again_weights = train(early(config_of(tmp_path / "switched", steps=4)))
    assert losses == early_losses == first + second + third
    for name, weight in weights.items():
        assert torch.equal(weight, early_weights[name]), name
        assert torch.equal(weight, again_weights[name]), name
        assert not torch.equal(weight, switched_weights[name]), name


def test_what_cannot_be_is_refused_with_what_to_do(tmp_path):
    config = early(tiny(tmp_path, micro_batch_rows=2))
    config.parallelism.dp_shard = 2
    texts = [str(p) for p in config.check_world(2)]
    assert texts == [
        "training.micro_batch_rows=2: makes 2 micro-batches of a rank's 4 rows, but with optimizer.in_backward=True each "
        "of them would be a step of its own; set training.micro_batch_rows=None, or training.global_batch_rows=4 (with "
        "a lower optimizer.lr), or optimizer.in_backward=False",
        "training.max_grad_norm=1.0: but with optimizer.in_backward=True the norm of all gradients is not known before "
        "the first of them are used up; set training.clip_by=parameter, or training.max_grad_norm=None, or "
        "optimizer.in_backward=False",
    ]
    config = early(config_of(tmp_path))
    config.parallelism.pp, config.parallelism.dp_shard = 2, 1
    assert [str(p) for p in config.check_world(2)] == [
        "parallelism.pp=2: but with optimizer.in_backward=True each micro-batch of a pipeline would be a step of its own; "
        "set parallelism.pp=1 (and more dp_shard or tp), or optimizer.in_backward=False"
    ]
    assert not list(early(config_of(tmp_path)).check_world(2))


def test_state_in_host_memory_needs_a_gpu(tmp_path):
    config = tiny(tmp_path)
    config.optimizer.offload = True
    assert [str(p) for p in config.check()] == [
        "optimizer.offload=True: but training.device=cpu trains in host memory anyway; set optimizer.offload=False"
    ]


def spoil(trainer, step, of):
    """Make the loss, or a weight's gradient, of one step NaN."""
    policy = trainer.models["policy"]
    forward, weight = policy.engine.forward, policy.model.blocks()[0].attention.q_proj.weight

    def spoiled(batch, context):
        sums = forward(batch, context)
        if trainer.step + 1 == step and of == "loss":
            sums.losses["next_token"] = sums.losses["next_token"] * float("nan")
        return sums

    policy.engine.forward = spoiled
    if of == "gradient":
        weight.register_hook(lambda g: g * float("nan") if trainer.step + 1 == step else g)
    return weight


def test_a_bad_loss_is_found_before_the_backward(tmp_path):
    config = early(config_of(tmp_path))
    config.checkpoint.every_n_steps = 2
    with running(config) as trainer:
        spoil(trainer, 3, "loss")
        with pytest.raises(
            NumericsError,
            match=r"step 3: the loss of rank 0 was not finite\. No weight was changed.*newest checkpoint: .*step-00000002",
        ):
            trainer.train()
        assert trainer.step == 2


def test_a_bad_gradient_is_masked_and_nothing_is_saved_from_its_step(tmp_path):
    config = early(config_of(tmp_path))
    config.checkpoint.every_n_steps = 1
    with running(config) as trainer:
        weight = spoil(trainer, 3, "gradient")
        with pytest.raises(
            NumericsError,
            match=r"step 3: loss=\d.*grad_norm=nan.*may have been updated in this step, and nothing was saved from it"
            r".*newest checkpoint: .*step-00000002",
        ):
            trainer.train()
        assert weight.isfinite().all()
        assert trainer.checkpointer.latest().name == "step-00000002"


def test_parameters_in_bfloat16_train_and_resume_exactly(tmp_path):
    def config(name, steps):
        made = config_of(tmp_path / name, steps=steps, parameter_dtype="bfloat16")
        made.optimizer.state_dtype = "bfloat16"
        return made

    losses, weights = train(config("straight", 5))
    first, _ = train(config("resumed", 2))
    second, resumed = train(early(config("resumed", 5)))
    assert first + second == losses
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name
    full, _ = train(config_of(tmp_path / "float32", steps=5))
    assert losses == pytest.approx(full, rel=2e-2)
    assert losses != full
