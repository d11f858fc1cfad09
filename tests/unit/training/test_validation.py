import json
import math

import pytest

from tests.tiny import running, tiny
from torchtitan.config import check_tree
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.errors import ConfigError
from torchtitan.metrics.sinks.jsonl import read_rows
from torchtitan.training.validation import Best, Validation


def validation(**fields) -> Validation.Config:
    data = Loader.Config(sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0)
    return Validation.Config(**{"every_n_steps": 1, "steps": 1, "data": data, **fields})


def judged(losses, **fields) -> Validation:
    found = Validation(validation(**fields), None, None, 1)
    found.gains = [
        found.judge(step, {"validation_loss": loss}) for step, loss in enumerate(losses, 1)
    ]
    return found


def test_the_best_is_the_lowest_or_the_highest():
    assert judged([3.0, 2.0, 2.0, 2.5]).best == Best(2, 2.0)
    assert judged([3.0, 2.0, 2.0, 2.5]).gains == [True, True, False, False]
    assert judged([3.0, 2.0, 4.0], mode="max").best == Best(3, 4.0)
    assert judged([math.nan, 2.0, math.nan]).gains == [False, True, False]


def test_patience_counts_evaluations_without_gain():
    assert not judged([3.0, 3.1], patience=2).exhausted
    assert judged([3.0, 3.1, 3.0], patience=2).exhausted
    assert not judged([3.0, 3.1, 2.9, 3.0], patience=2).exhausted
    assert not judged([3.0, 4.0, 5.0]).exhausted


def test_the_state_goes_on_and_another_metric_begins_anew():
    old = judged([3.0, 3.5], patience=3)
    new = Validation(validation(patience=3), None, None, 1)
    new.load_state(json.loads(json.dumps(old.state())))
    assert (new.best, new.n_without_gain) == (Best(1, 3.0), 1)
    other = Validation(validation(metric="validation_perplexity"), None, None, 1)
    other.load_state(old.state())
    assert other.best is None


def test_wrong_settings():
    config = tiny("x")
    config.validation = validation(patience=0)
    assert "validation.patience=0: is not positive; set 1 or more" in str(check_tree(config, 1)[0])
    with pytest.raises(
        ConfigError, match=r"validation.metric='nope' is not among .*validation_loss"
    ):
        Validation(validation(metric="nope"), None, None, 1).judge(1, {"validation_loss": 1.0})


def run(tmp_path, losses, *, steps=6, **fields):
    """Train with made-up validation losses; the steps done and the checkpoints left."""
    config = tiny(tmp_path / "run", steps=steps)
    config.checkpoint.keep_latest = 1
    config.validation = validation(**fields)
    with running(config) as trainer:
        values = iter(losses)
        trainer.validation.run = lambda: {"validation_loss": next(values)}
        trainer.train()
        left = sorted(p.name for p in trainer.checkpointer.folder.path.glob("step-*"))
        return trainer.step, [int(name.removeprefix("step-")) for name in left]


def test_the_best_checkpoint_is_kept_whatever_its_age(tmp_path):
    assert run(tmp_path, [3.0, 2.0, 2.5, 2.6, 2.7, 2.8], keep_best=True) == (6, [2, 6])
    best = json.loads((tmp_path / "run" / "best.json").read_text(encoding="utf-8"))
    assert best["step"] == 2
    assert best["validation_loss"] == 2.0
    assert best["checkpoint"].endswith("step-00000002")


def test_a_resumed_run_still_keeps_the_best(tmp_path):
    assert run(tmp_path, [3.0, 2.0, 2.5], steps=3, keep_best=True) == (3, [2, 3])
    assert run(tmp_path, [2.6, 2.1], steps=5, keep_best=True) == (5, [2, 5])
    assert run(tmp_path, [1.0], steps=6, keep_best=True) == (6, [6])


def test_a_run_ends_early_saves_and_stays_ended(tmp_path):
    assert run(tmp_path, [3.0, 3.1, 3.2, 0.0], patience=2) == (3, [3])
    assert run(tmp_path, [0.0], patience=2) == (3, [3])
    assert run(tmp_path, [3.3, 2.0, 1.0], patience=4) == (6, [6])


def test_the_initial_weights_are_evaluated_on_request_and_judged_by_nobody(tmp_path):
    losses = [1.0, 3.0, 2.0, 2.5]  # the first is of the initial weights
    assert run(tmp_path, losses, steps=3, at_start=True, keep_best=True, patience=2) == (3, [2, 3])
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    found = [(r["global_step"], r["validation_loss"]) for r in rows if "validation_loss" in r]
    assert found == [(0, 1.0), (1, 3.0), (2, 2.0), (3, 2.5)]
    assert run(tmp_path, [2.2], steps=4, at_start=True) == (4, [4])  # not again in a resumed run
