import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchtitan import torch_api, train

ROOT = Path(train.__file__).parent.parent
TOY = ["--module", "tests.unit.cli.toy_run", "--config", "toy_run"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch_api, "cuda", type("Cuda", (), {"device_count": lambda: 0}))


def test_one_process_trains_here_and_closes(capsys):
    assert train.main(TOY) == 0
    assert capsys.readouterr().out == "rank 0 of 1 in outputs/toy_run\nclosed 0\n"


def test_the_folder_can_be_chosen(capsys):
    assert train.main([*TOY, "--folder", "x/y"]) == 0
    assert "in x/y\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("act", "code", "text"),
    [
        ("data", 3, "error: no rows in x.jsonl; give some\n"),
        ("numerics", 5, "error: step 3: loss=nan\n"),
        ("close", 3, "error: closing failed\n"),
        ("bug", 1, "ZeroDivisionError: a bug of ours\n"),
    ],
)
def test_an_error_closes_the_run_and_ends_with_its_code(capsys, act, code, text):
    before = signal.getsignal(signal.SIGTERM)
    assert train.main([*TOY, "--act", act]) == code
    out, err = capsys.readouterr()
    assert out.endswith("closed 0\n")
    assert err.endswith(text)
    assert ("Traceback" in err) is (act == "bug")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_outside_of_a_step_ends_the_run_as_preempted(capsys):
    main_thread = threading.get_ident()
    timer = threading.Timer(0.5, signal.pthread_kill, (main_thread, signal.SIGINT))
    timer.start()
    assert train.main([*TOY, "--act", "hang"]) == 7
    expected = "stopped by SIGINT outside of a step; nothing was saved\n"
    assert capsys.readouterr().err.endswith(expected)


def test_all_problems_are_reported_once_and_nothing_is_built(capsys):
    assert train.main([*TOY, "--acts", "data", "--on-rank", "x", "--timeout-s", "1 2", "y"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: 3 problems, nothing was started",
        "  acts=data: no such field in this recipe; did you mean --act?",
        "  on-rank=x: does not fit the field's type, int; give INT, such as the recipe's 0",
        "  timeout-s=1 2 y: got 2 values, but takes FLOAT; give FLOAT, such as the recipe's 60.0",
    ]


def test_overrides_and_the_rules_of_the_tree_are_reported_together(capsys, monkeypatch):
    recipe = ["--module", "tests.unit.cli.toy_checked", "--config", "toy_checked"]
    assert train.main([*recipe, "--zzz", "1", "--rows", "0", "--ngpu", "3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 3 problems, nothing was started",
        "  zzz=1: no such field in this recipe; --help lists the fields",
        "  rows=0: is not positive; set 1 or more",
        "  rows=0: is less than the 3 ranks; set 3 or more",
    ]


def test_more_processes_than_gpus_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch_api, "cuda", type("Cuda", (), {"device_count": lambda: 2}))
    assert train.main([*TOY, "--ngpu", "4"]) == 2
    expected = "  --ngpu=4: is more than the 2 GPUs of this machine; set it to 2 or less\n"
    assert capsys.readouterr().err.endswith(expected)


def test_a_recipe_that_returns_no_root_is_refused(capsys):
    assert train.main([*TOY[:3], "no_root"]) == 2
    assert capsys.readouterr().err == (
        "error: --config no_root: returned Configurable.Config, which has no folder and build(); "
        "a recipe returns the root config, such as Trainer.Config(...)\n"
    )


def test_dry_run_prints_the_tree_and_what_differs(capsys):
    assert train.main([*TOY, "--dry-run", "--act", "data", "--ngpu", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "recipe tests.unit.cli.toy_run:toy_run, 2 ranks"
    assert "  folder     'outputs/toy_run'" in out
    assert "* act        'data'" in out
    assert out[-2:] == ["differs from the recipe:", "  act: 'work' -> 'data'"]
    assert train.main([*TOY, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("differs from the recipe:\n  nothing\n")


def test_help_teaches_the_options_and_the_recipes_fields(capsys):
    assert train.main([*TOY, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--ngpu N processes on this machine" in text
    assert "Run folder. (default: outputs/toy_run)" in text


def test_a_broken_recipe_module_shows_its_own_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "broken_recipes.py"
    file.write_text("import no_such_package\ndef toy(): ...\n", encoding="utf-8")
    assert train.main(["--module", str(file), "--config", "toy"]) == 1
    err = capsys.readouterr().err
    assert "ModuleNotFoundError: No module named 'no_such_package'" in err
    assert "broken_recipes.py" in err
    assert "no such module" not in err


def test_the_default_recipe_is_checked_before_anything_heavy_is_imported():
    program = """if True:
        import sys
        from torchtitan.train import main

        assert main(["--dry-run", "--ngpu", "2", "--training.steps", "0"]) == 2
        assert main(["--training.stepz", "1"]) == 2
        assert main(["--ngpu", "7", "--training.steps", "x"]) == 2
        assert main(["--help"]) == 0
        heavy = ["distributed.tensor", "distributed.fsdp", "distributed.checkpoint"]
        heavy = [f"torch.{name}" for name in heavy] + ["torch._dynamo", "torch._inductor"]
        heavy += ["datasets", "tokenizers", "pyarrow", "pandas", "matplotlib", "wandb", "tensorboard"]
        found = [name for name in heavy if name in sys.modules]
        assert not found, found
        import multiprocessing, torch

        assert not torch.distributed.is_initialized()
        assert not multiprocessing.active_children()
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
