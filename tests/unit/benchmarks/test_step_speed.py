"""The contest of steps between our Trainer and a bare loop; peers are not installed for a test."""

import argparse
import json
import sys

import pytest
from safetensors.torch import load_file

from benchmarks import achieved_flops, first_step, step_speed
from benchmarks.peers import Worker
from benchmarks.step_speed import BARE, CHECKED_STEPS, OURS, make_contest

ARGS = argparse.Namespace(dim=128, layers=1, rows=2, seq_len=32, warmup=0, rounds=2, compile=False)


def run(main, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    main()


def test_all_train_on_the_same_tokens_of_one_document_a_row(tmp_path):
    make_contest(tmp_path, ARGS)
    rows = load_file(tmp_path / "rows.safetensors")
    assert rows["tokens"].shape == (CHECKED_STEPS + ARGS.rounds + 1, ARGS.rows, ARGS.seq_len)
    assert (rows["labels"][..., :-1] == rows["tokens"][..., 1:]).all()
    assert (rows["labels"][..., -1] == -100).all()


def test_a_trainer_and_a_bare_loop_are_compared(tmp_path, monkeypatch, capsys):
    path = tmp_path / "result.json"
    sizes = ["--dim", 128, "--layers", 1, "--rows", 2, "--seq-len", 32, "--threads", 1]
    run(
        step_speed.main,
        monkeypatch,
        *("--rounds", 2, "--warmup", 0, "--without", "transformers", "torchtune", "--json", path),
        *sizes,
    )  # ends the test if their losses differ
    found = json.loads(path.read_text(encoding="utf-8"))["contestants"]
    assert list(found) == [OURS, BARE]
    for measured in found.values():
        assert measured["threads"] == 1
        assert len(measured["seconds"]) == len(measured["cpu_s"]) == 2
        assert all(cpu > 0 for cpu in measured["cpu_s"])
    assert found[OURS]["seconds_over_ours"]["median"] == 1
    assert "| torchtitan, bare loop |" in capsys.readouterr().out


def test_flops_are_counted_beside_products_of_the_same_process(tmp_path, monkeypatch):
    monkeypatch.setattr(achieved_flops, "SQUARE", 64)
    path = tmp_path / "result.json"
    sizes = ["--dim", 128, "--layers", 1, "--rows", 2, "--seq-len", 32, "--threads", 1]
    run(achieved_flops.main, monkeypatch, "--rounds", 2, "--warmup", 0, "--json", path, *sizes)
    (found,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert found["shapes"] == {"square": [64, 64, 64], "own": [64, 128, 352]}
    for clock in ("seconds", "cpu_s"):
        assert found[f"step_gflops_by_{clock}"]["n"] == 2
        assert found[f"own_gflops_by_{clock}"]["n"] == 3  # before, between, after
        assert 0 < found[f"share_of_own_by_{clock}"]["median"] < 1


def test_a_command_is_measured_to_its_end(tmp_path, monkeypatch):
    def install(name, *_):
        pytest.fail(f"{name} is installed, and nobody asked for it")

    monkeypatch.setattr(first_step, "environment", install)
    path = tmp_path / "result.json"
    run(
        first_step.main,
        monkeypatch,
        *("--rounds", 1, "--only", "help", "--without", "accelerate", "transformers", "tune"),
        *("--json", path),
    )
    found = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert list(found) == ["help"]
    assert list(found["help"]) == ["torchtitan --help"]
    assert found["help"]["torchtitan --help"]["cpu_s"]["median"] > 0
    with pytest.raises(SystemExit, match=r"ended with 1(?s:.*)no such thing"):
        first_step.whole_process(None, "raise ValueError('no such thing')", str(tmp_path), [])


@pytest.mark.parametrize("key", ["torch", "threads"])
def test_contestants_of_another_torch_are_not_compared(key):
    class Toy(Worker):
        def __init__(self, fact):
            self.fact = fact

        def ask(self, question):
            facts = {"torch": "2.13", "threads": 2, key: self.fact}
            return facts if question == "facts" else {"loss": 1.0, "seconds": 1.0, "cpu_s": 1.0}

        def close(self):
            pass

    with pytest.raises(SystemExit, match=f"contestants differ in {key}: .*nothing is compared"):
        step_speed.contest({"a": lambda: Toy("1"), "b": lambda: Toy("3")}, ARGS)
