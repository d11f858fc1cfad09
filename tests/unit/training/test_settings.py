import pytest
import torch

from tests.tiny import running, tiny
from torchtitan.errors import ConfigError
from torchtitan.training.settings import Training


def config(**changes):
    return Training.Config(**{"steps": 1, "seq_len": 8, "global_batch_rows": 8, **changes})


def test_rows_that_do_not_divide_are_refused_with_what_does():
    (problem,) = config().check_rows(3)
    assert str(problem) == (
        "global_batch_rows=8: does not divide by the 3 data ranks; "
        "set [6, 9], or use another number of ranks"
    )
    (problem,) = config(micro_batch_rows=3).check_rows(2)
    assert problem.reason.startswith(
        "does not divide the 4 rows of a rank (global_batch_rows=8 / 2"
    )
    assert problem.remedy == "choose one of [1, 2, 4], or None for all"
    assert list(config(micro_batch_rows=2).check_rows(4)) == []


def test_ranges():
    bad = config(
        steps=0,
        seq_len=-1,
        global_batch_rows=0,
        gc_every_n_steps=0,
        micro_batch_rows=0,
        max_grad_norm=0.0,
        seed=-1,
    )
    assert [p.path for p in bad.check()] == [
        "steps",
        "seq_len",
        "global_batch_rows",
        "gc_every_n_steps",
        "micro_batch_rows",
        "max_grad_norm",
        "seed",
    ]


def test_the_length_of_a_run_is_said_once():
    assert [str(p) for p in config(epochs=3).check()] == [
        "epochs=3: and steps=1 both say how long the run is; set one of them to None"
    ]
    assert [str(p) for p in config(steps=None).check()] == [
        "steps=None: and epochs=None leave open how long the run is; set one of them"
    ]
    assert list(config(steps=None, epochs=0.5).check()) == []
    for epochs in (0.0, -1.0, float("inf"), float("nan")):
        (problem,) = config(steps=None, epochs=epochs).check()
        assert (problem.path, problem.reason) == ("epochs", "is not positive")


def test_steps_of_epochs():
    table = [(1, 80, 10), (1, 81, 11), (3, 81, 31), (0.5, 81, 6), (0.001, 8, 1), (0.7, 80, 7)]
    for epochs, rows, steps in table:
        assert config(steps=None, epochs=epochs).n_steps(rows) == steps
    assert config(steps=7).n_steps(None) == config(steps=7).n_steps(80) == 7
    with pytest.raises(
        ConfigError, match=r"training\.epochs=3: how many rows .* set training\.steps"
    ):
        config(steps=None, epochs=3).n_steps(None)


def test_compute_dtype():
    assert Training.compute_dtype(config(), torch.device("cpu")) == torch.float32
    assert Training.compute_dtype(config(), torch.device("cuda")) == torch.bfloat16
    chosen = config(compute_dtype="bfloat16")
    assert Training.compute_dtype(chosen, torch.device("cpu")) == torch.bfloat16


def test_deterministic_kernels_are_asked_for_and_not_left_on_for_the_next_run(tmp_path):
    try:
        for wanted in (True, False):
            with running(tiny(tmp_path / str(wanted), deterministic=wanted)):
                assert torch.are_deterministic_algorithms_enabled() == wanted
    finally:
        torch.use_deterministic_algorithms(False)
