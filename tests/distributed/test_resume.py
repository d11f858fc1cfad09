"""A resumed run is the uninterrupted one."""

import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist

from tests.tiny import full, tiny, weights
from torchtitan.errors import CheckpointError, DataError, Preempted
from torchtitan.training.rng import rng_state


def run(folder, steps, *, noise=False, change=lambda config: None, **training):
    """Train to ``steps``; (losses by step, weights and optimizer state, error or None)."""
    config = tiny(folder, steps=steps, **training)
    change(config)
    losses, error = {}, None
    trainer = config.build()
    step_function = trainer.train_step

    def recording(microbatches):
        metrics = step_function(microbatches)
        losses[trainer.step] = metrics.loss.item()
        return metrics

    trainer.train_step = recording
    if noise:  # stands for dropout: the ranks' own generators decide the loss
        engine = trainer.models["policy"].engine
        forward = engine.forward

        def noisy(batch, context):
            sums = forward(batch, context)
            sums.losses["next_token"] = sums.losses["next_token"] * (1 + 0.1 * torch.rand(()))
            return sums

        engine.forward = noisy
    try:
        trainer.train()
    except (Preempted, DataError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    state = {n: full(t) for n, t in trainer.models["policy"].optimizer.state_tensors().items()}
    result = (losses, weights(trainer) | state, error)
    trainer.close()
    return result


def series(folder, stops, workers, noise, async_save=False):
    """Losses of a run that is stopped and resumed at each of ``stops``, and its final tensors."""
    losses = {}
    for steps in stops:

        def change(config):
            config.data.n_workers = workers
            config.checkpoint.async_save = async_save
            config.checkpoint.every_n_steps = 4 if async_save else 0

        more, tensors, _ = run(folder, steps, noise=noise, change=change)
        assert not losses.keys() & more.keys()
        losses |= more
    return losses, tensors


@pytest.mark.parametrize(
    ("world_size", "workers"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)], ids=str
)
def test_resumed_equals_straight_bit_for_bit(ranks, tmp_path, world_size, workers):
    straight = ranks(series, world_size, tmp_path / "a", [20], 0, True)
    resumed = ranks(series, world_size, tmp_path / "b", [10, 13, 20], workers, True)
    for (losses, tensors), (want_losses, want_tensors) in zip(resumed, straight, strict=True):
        assert losses == want_losses
        assert list(losses) == list(range(1, 21))
        assert tensors.keys() == want_tensors.keys()
        for name in tensors:
            assert torch.equal(tensors[name], want_tensors[name]), name


def test_resumed_from_asynchronous_saves(ranks, tmp_path):
    straight = ranks(series, 2, tmp_path / "a", [14], 0, True)
    resumed = ranks(series, 2, tmp_path / "b", [6, 14], 0, True, True)
    for (losses, tensors), (want_losses, want_tensors) in zip(resumed, straight, strict=True):
        assert losses == want_losses
        assert all(torch.equal(tensors[name], want_tensors[name]) for name in tensors)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_resume_on_another_number_of_ranks(ranks, tmp_path, before, after):
    (straight, _), *_ = ranks(series, 1, tmp_path / "a", [8], 0, False)
    (first, _), *_ = ranks(series, before, tmp_path / "b", [4], 0, False)
    (second, _), *_ = ranks(series, after, tmp_path / "b", [8], 0, False)
    assert first | second == pytest.approx(straight, rel=1e-5)
    assert list(second) == [5, 6, 7, 8]


def refused(folder, change):
    with pytest.raises(CheckpointError) as caught:
        run(folder, 4, change=change)
    return str(caught.value)


def raise_lr(config):
    config.optimizer.lr = 0.5


def raise_lr_on_purpose(config):
    raise_lr(config)
    config.checkpoint.allow_changes = ("optimizer",)


def operational(config):
    config.metrics.every_n_steps = 3
    config.training.micro_batch_rows = 2
    config.checkpoint.keep_latest = 1
    config.data.n_workers = 1


def test_a_change_of_the_mathematics_is_refused_with_the_difference(ranks, tmp_path):
    ranks(run, 1, tmp_path, 2)
    (text,) = ranks(refused, 1, tmp_path, raise_lr)
    assert "optimizer.lr: 0.01 -> 0.5" in text
    assert "--checkpoint.allow-changes optimizer.lr" in text
    ((losses, _, _),) = ranks(run_with, 1, tmp_path, 3, raise_lr_on_purpose)
    assert list(losses) == [3]
    ((losses, _, _),) = ranks(run_with, 1, tmp_path, 5, back_on_purpose)
    assert list(losses) == [4, 5]


def back_on_purpose(config):
    operational(config)
    config.checkpoint.allow_changes = ("optimizer.lr",)


def run_with(folder, steps, change):
    return run(folder, steps, change=change)


def derive_schedule(config):
    config.schedule.steps = None


def test_more_steps_with_a_derived_schedule_are_refused(ranks, tmp_path):
    ranks(run_with, 1, tmp_path, 3, derive_schedule)
    (text,) = ranks(refused, 1, tmp_path, derive_schedule)
    assert "schedule.steps: 3 -> 4" in text


def test_a_finished_run_has_nothing_to_do(ranks, tmp_path):
    ranks(run, 1, tmp_path, 2)
    ((losses, _, error),) = ranks(run, 1, tmp_path, 2)
    assert losses == {}
    assert error is None


def stopped(folder, rank, step):
    """One rank gets SIGTERM in the middle of a step."""
    config = tiny(folder, steps=12)
    trainer = config.build()
    forward = trainer.models["policy"].engine.forward

    def interrupted(batch, context):
        if dist.get_rank() == rank and trainer.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(batch, context)

    trainer.models["policy"].engine.forward = interrupted
    try:
        with pytest.raises(Preempted) as caught:
            trainer.train()
        return str(caught.value), trainer.step
    finally:
        trainer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_on_one_rank_saves_on_all_and_the_run_goes_on(ranks, tmp_path, world_size):
    straight = ranks(run, world_size, tmp_path / "a", 12)
    outcomes = ranks(stopped, world_size, tmp_path / "b", world_size - 1, 5)
    texts, steps = zip(*outcomes, strict=True)
    assert len(set(steps)) == 1
    assert 5 <= steps[0] <= 6
    assert f"stopped after step {steps[0]} of 12" in texts[0]
    assert f"step-{steps[0]:08d}" in texts[0]
    for (losses, tensors, _), (want, want_tensors, _) in zip(
        ranks(run, world_size, tmp_path / "b", 12), straight, strict=True
    ):
        assert losses == {step: loss for step, loss in want.items() if step > steps[0]}
        assert all(torch.equal(tensors[name], want_tensors[name]) for name in tensors)


def failing_data(folder, rank, step):
    config = tiny(folder, steps=6)
    trainer = config.build()
    draw = trainer.loader.next

    def fail():
        if dist.get_rank() == rank and trainer.step == step - 1:
            raise DataError("data.jsonl, row 7: not JSON")
        return draw()

    trainer.loader.next = fail
    with pytest.raises(DataError) as caught:
        trainer.train()
    trainer.close()
    return str(caught.value), trainer.step


def test_a_rank_without_data_ends_all_ranks_at_the_same_step(ranks, tmp_path):
    (text0, step0), (text1, step1) = ranks(failing_data, 2, tmp_path, 1, 3)
    assert step0 == step1
    assert text1 == "data.jsonl, row 7: not JSON"
    assert text0 == "another rank has no data; see its message"


def test_generators_of_the_ranks_differ_and_come_back(ranks, tmp_path):
    first, second = ranks(rng_after, 2, tmp_path, 3)
    assert not torch.equal(first, second)
    assert torch.equal(ranks(rng_after, 2, tmp_path, 3)[1], second)


def rng_after(folder, steps):
    run(folder, steps, noise=True)
    return rng_state(torch.device("cpu"))["torch"]


def test_a_fresh_folder_starts_afresh(ranks, tmp_path):
    ((first, _, _),) = ranks(run, 1, tmp_path, 3)
    shutil.rmtree(tmp_path)
    ((again, _, _),) = ranks(run, 1, tmp_path, 3)
    assert first == again
