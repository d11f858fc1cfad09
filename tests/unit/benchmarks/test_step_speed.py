"""The contest of steps between our Trainer and a bare loop; peers are not installed for a test."""

import argparse
import json
from functools import partial

import pytest
from safetensors.torch import load_file

from benchmarks import step_speed
from benchmarks.peers import Worker
from benchmarks.step_speed import BARE, CHECKED_STEPS, OURS, contest, make_contest

ARGS = argparse.Namespace(
    dim=128, layers=1, rows=2, seq_len=32, warmup=0, rounds=2, compile=False, threads=1
)


def test_a_trainer_and_a_bare_loop_compute_the_same_on_the_same_tokens(tmp_path):
    setup = make_contest(tmp_path, ARGS)
    rows = load_file(tmp_path / "rows.safetensors")
    assert rows["tokens"].shape == (CHECKED_STEPS + ARGS.rounds + 1, ARGS.rows, ARGS.seq_len)
    assert (rows["labels"][..., :-1] == rows["tokens"][..., 1:]).all()
    assert (rows["labels"][..., -1] == -100).all()
    first = json.loads((tmp_path / "documents.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["text"].strip()
    worker = partial(Worker, setup=setup, environ={"OMP_NUM_THREADS": "1"})
    found = contest(
        {
            OURS: partial(worker, OURS, "torchtitan_step.py"),
            BARE: partial(worker, BARE, "bare_step.py"),
        },
        ARGS,
    )  # ends the test if their losses differ
    for measured in found.values():
        assert measured["threads"] == 1
        assert len(measured["seconds"]) == len(measured["cpu_s"]) == ARGS.rounds
        assert all(cpu > 0 for cpu in measured["cpu_s"])


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
