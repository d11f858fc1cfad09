"""A request to stop, at the moments when there is little or nothing to save."""

import os
import signal

import pytest

from tests.tiny import running, tiny
from torchtitan.errors import Preempted


def stopped_in_the_first_draw(folder):
    """The error of a run that is asked to stop before its first step."""
    with running(tiny(folder)) as trainer:
        draw = trainer.loader.next

        def next_rows():
            if trainer.step == start:
                os.kill(os.getpid(), signal.SIGTERM)
            return draw()

        start, trainer.loader.next = trainer.step, next_rows
        with pytest.raises(Preempted) as error:
            trainer.train()
        return trainer.step - start, str(error.value)


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    steps, text = stopped_in_the_first_draw(tmp_path)
    assert steps == 0
    assert "stopped after step 0 of 4, with nothing to save" in text
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_resumed_run_that_did_no_step_keeps_its_checkpoint(tmp_path):
    with running(tiny(tmp_path, steps=2)) as trainer:
        trainer.train()
    steps, text = stopped_in_the_first_draw(tmp_path)
    assert steps == 0
    assert "stopped after step 2 of 4, saved as" in text
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]
    with running(tiny(tmp_path)) as trainer:
        trainer.train()
        assert trainer.step == 4


def test_a_step_that_was_just_saved_is_not_saved_again(tmp_path):
    config = tiny(tmp_path, steps=6)
    config.checkpoint.every_n_steps = 2
    saved = []
    with running(config) as trainer:
        step, save = trainer.train_step, trainer.checkpointer.save

        def step_and_ask(rows):
            if trainer.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(rows)

        def count(number, **what):
            saved.append(number)
            save(number, **what)

        trainer.train_step, trainer.checkpointer.save = step_and_ask, count
        with pytest.raises(Preempted, match="saved as"):
            trainer.train()
    assert len(saved) == len(set(saved)), saved
