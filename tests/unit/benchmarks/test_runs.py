"""Runs that benchmarks measure: their processes, their rows, and the loop written by hand."""

import mmap
import time

import pytest
import torch

from benchmarks import peers
from benchmarks.peers import PeerError
from benchmarks.runs import (
    BareLoop,
    Random,
    Ranks,
    Run,
    forget_peak,
    peak_of_tensors,
    setup_of,
    status,
    timed,
    without_files,
)
from tests.unit.planner.cases import small
from torchtitan.optim.schedule import Schedule
from torchtitan.planner.memory import plan_memory
from torchtitan_recipes.sft import llama3_1_8b_full_x1

WORKER = f"""
import json, os, sys, time
sys.path.insert(0, {str(peers.WORKERS)!r})
from serving import serve

def rank(): return int(os.environ.get("RANK", -1)), os.environ.get("WORLD_SIZE")
def fail_on(number):
    if rank()[0] == number:
        raise ValueError("this rank alone")
    time.sleep(600)  # as in a collective that the other does not come to

serve({{"rank": rank, "fail_on": fail_on, "echo": lambda x: x}})
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    return str(path)


def test_ranks_know_each_other_and_answer_by_rank(script):
    with Ranks(script, {}, ranks=2) as run:
        assert run.ask("rank") == [[0, "2"], [1, "2"]]
        assert run.ask("echo", x=3) == [3, 3]
    with Ranks(script, {}) as run:
        assert run.ask("rank") == [[-1, None]]


def test_a_rank_that_fails_ends_those_that_wait_for_it(script):
    begin = time.monotonic()
    with Ranks(script, {}, ranks=2) as run, pytest.raises(PeerError, match="this rank alone"):
        run.ask("fail_on", number=1)
    assert time.monotonic() - begin < 300


def test_a_run_without_files_keeps_what_is_measured():
    config = llama3_1_8b_full_x1()
    plain = without_files(config)
    assert (plain.checkpoint.initial_load, plain.checkpoint.export, plain.validation) == (
        "",
        None,
        None,
    )
    assert plain.model == config.model
    config.training.steps, config.training.epochs = (
        plain.training.steps,
        None,
    )  # of rows without end
    assert plain.training == config.training
    assert plain.optimizer == config.optimizer
    assert config.validation is not None  # the recipe's own is left as it is


def test_rows_differ_by_step_and_rank_and_every_token_has_its_label():
    config = small(micro_batch_rows=2)
    first, other = (Random(config, rank, 2) for rank in (0, 1))
    cpu = torch.device("cpu")
    one, two, elsewhere = (r.microbatches(2, cpu) for r in (first, first, other))
    assert [len(batch["tokens"]) for batch in one] == [2, 2]  # of 8 rows, on two ranks
    assert torch.equal(one[0]["tokens"][:, 1:], one[0]["labels"][:, :-1])
    assert not torch.equal(one[0]["tokens"], two[0]["tokens"])
    assert not torch.equal(one[0]["tokens"], elsewhere[0]["tokens"])
    assert one[0]["labels"].min() >= 0
    assert one[0]["document_ids"] is None


def test_the_loop_written_by_hand_computes_what_the_trainer_does(tmp_path):
    config = without_files(small(global_batch_rows=2))
    config.schedule = Schedule.Config(decay_steps=0)
    run, bare = Run(config, tmp_path), BareLoop(config)
    try:
        for _ in range(3):
            (_, ours), (_, theirs) = timed(run, 1), timed(bare, 1)
            assert ours == pytest.approx(theirs, rel=1e-5)
        planned = plan_memory(config, 1, gpu=False, packed=False).peak.total
        assert peak_of_tensors(run) == pytest.approx(planned, rel=0.03)
        assert peak_of_tensors(bare) > planned  # all logits at once
    finally:
        run.trainer.close()


def test_a_worker_gets_the_config_that_was_meant(tmp_path):
    config = without_files(small(global_batch_rows=2))
    run = Run.of(setup_of(config, tmp_path))
    run.trainer.close()
    assert run.trainer.config.model == config.model
    with pytest.raises(TypeError, match=r"is no Trainer\.Config"):
        Run.of({"config": setup_of(config.training, "")["config"], "folder": ""})


def test_the_high_water_mark_is_that_since_it_was_forgotten():
    before = forget_peak()
    with mmap.mmap(-1, 64 * 2**20) as memory:  # not malloc's, which may have kept what was freed
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    assert 60 * 2**20 < status("VmHWM") - before < 90 * 2**20
