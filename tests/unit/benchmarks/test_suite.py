"""Suites for GPUs: the plan without one, the same code on a tiny shape, and what is said of cases that are not measured."""

import dataclasses
import json

import pytest
import torch

from benchmarks import suite
from benchmarks.h100x8 import fsdp_8b, full_70b, memory_ladder_3b
from benchmarks.one_gpu import __main__ as one_gpu
from benchmarks.peers import PeerError, Spread
from benchmarks.runs import without_files
from benchmarks.suite import (
    ALL_TOKENS,
    Budget,
    Case,
    Ceilings,
    Measured,
    Planned,
    ladder,
    outcomes,
    result_table,
    smoke,
    with_all_logits,
)
from tests.unit.planner.cases import small
from torchtitan.config import check_tree
from torchtitan.planner.devices import GIB, Device, find_device

SUITES = {
    "one_gpu": one_gpu,
    "fsdp_8b": fsdp_8b,
    "full_70b": full_70b,
    "memory_ladder_3b": memory_ladder_3b,
}
CPU = ["--device", "cpu", "--smoke"]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("name", SUITES)
def test_without_a_gpu_the_plan_is_shown_and_called_a_prediction(name, no_gpu, capsys, tmp_path):
    SUITES[name].suite(["--json", str(tmp_path / "plan.json")])
    out = capsys.readouterr().out
    ranks = 1 if name in ("one_gpu", "memory_ladder_3b") else 8
    assert f"This machine has no GPU, and this needs {ranks}: nothing is measured" in out
    assert "prediction for H100-80GB (79.1 GiB)" in out
    shown = [case for case in SUITES[name].cases() if not case.bare]
    rows = [line for line in out.splitlines() if line.startswith(f"| {shown[0].group[:6]}")]
    assert len(json.loads((tmp_path / "plan.json").read_text())["planned"]) == len(shown)
    assert all(any(case.name in row for row in rows) for case in shown)


def test_too_few_gpus_show_the_plan_of_another_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    full_70b.suite(["--plan-for", "H200", "--only", "T=8,192, + 8-bit"])
    out = capsys.readouterr().out
    assert "has 2 GPUs, and this needs 8" in out
    (row,) = [line for line in out.splitlines() if line.startswith("| 70B")]
    assert "fits, 81." in row


def test_the_last_rung_of_70b_is_the_recipe_and_plain_adamw_does_not_fit():
    plain, *_, last = [c for c in full_70b.cases() if c.group == "70B, T=8,192"]
    recipe = without_files(full_70b.llama3_3_70b_full_h100x8())
    assert without_files(last.config) == recipe
    usable = find_device("H100-80GB")
    assert Planned.of(plain, usable).total > usable.memory > Planned.of(last, usable).total


@pytest.mark.parametrize("name", SUITES)
def test_every_case_can_run_as_it_is_and_small(name):
    for case in SUITES[name].cases():
        for each in (case, smoke(case)):
            config = without_files(each.config)
            config.folder = "unused"
            assert [str(p) for p in check_tree(config, each.ranks)] == [], (case.group, case.name)


def test_a_ladder_keeps_what_came_before():
    config = with_all_logits(small())
    names = ["linear cross-entropy", "optimizer in backward", "8-bit states"]
    first, second, third = (changed for _, changed in ladder(config, names))
    assert config.model.head.chunk_tokens == ALL_TOKENS
    assert first.model.head.chunk_tokens == third.model.head.chunk_tokens == 1024
    assert not first.optimizer.in_backward
    assert second.optimizer.in_backward
    assert second.optimizer.state_dtype == "float32"
    assert (third.optimizer.in_backward, third.optimizer.state_dtype) == (True, "int8")


def check_results(path):
    """All cases of a smoke test ran, computed the same, and took the memory that was planned."""
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    for case in cases:
        measured = case["measured"]
        assert measured is not None, case["note"]
        assert case["note"] == ""
        assert measured["first_loss"] == pytest.approx(8.3, abs=0.2)  # ln 4096
        assert measured["step_s"]["median"] > 0
        if measured["peak"] and case["case"] != "bare loop":
            assert case["planned"]["tensors"] == pytest.approx(measured["peak"], rel=0.04)
    return [case["case"] for case in cases]


def test_the_same_code_runs_on_a_tiny_shape_without_a_gpu(capsys, tmp_path):
    only = ["--only", "0.6B, bare", "0.6B, + 8-bit"]
    one_gpu.suite([*CPU, *only, "--json", str(tmp_path / "found.json")])
    assert check_results(tmp_path / "found.json") == ["bare loop", "+ 8-bit states"]
    out = capsys.readouterr().out
    assert "tiny shapes on the CPU: a test of the code, no result" in out
    assert "1.00x" in out


@pytest.mark.slow
def test_all_cases_of_a_shape_run(tmp_path):
    one_gpu.suite([*CPU, "--only", "1.7B", "--minutes", "60", "--json", str(tmp_path / "a.json")])
    assert len(check_results(tmp_path / "a.json")) == 7
    memory_ladder_3b.suite([*CPU, "--json", str(tmp_path / "b.json")])
    assert len(check_results(tmp_path / "b.json")) == 7


@pytest.mark.slow
def test_cases_of_several_gpus_run_on_two_ranks(tmp_path):
    fsdp_8b.suite([*CPU, "--json", str(tmp_path / "a.json")])
    assert len(check_results(tmp_path / "a.json")) == 3
    full_70b.suite([*CPU, "--only", "T=4,096, + 8", "--json", str(tmp_path / "b.json")])
    assert len(check_results(tmp_path / "b.json")) == 1


MEASURED = Measured(Spread(0.5, 0.4, 0.6, 5), 8.3, 3 * GIB, 4 * GIB)
DEVICE = Device("a device", 40 * GIB)


def case_named(name, later=0, **changes):
    return Case(group="small", name=name, config=small(**changes), later=later)


def run_with(measured, cases, budget=None, monkeypatch=None):
    asked = []

    def measure(case, **_):
        asked.append(case.name)
        found = measured(case)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(suite, "measure", measure)
    found = outcomes(cases, DEVICE, budget or Budget(60, 1e12), gpu=True, quick=False)
    return asked, {outcome.case.name: outcome for outcome in found}


def test_what_does_not_fit_is_not_tried(monkeypatch):
    large = small(model={"dim": 8192, "vocab_size": 128_256})
    cases = [Case(group="x", name="large", config=large), case_named("small")]
    asked, found = run_with(lambda case: MEASURED, cases, monkeypatch=monkeypatch)
    assert asked == ["small"]
    assert found["large"].note.startswith("does not fit: ")
    assert found["large"].note.endswith(" GiB planned, 40.0 free")


def test_a_failure_is_told_and_does_not_end_the_others(monkeypatch):
    errors = {
        "memory": PeerError("the run failed:\ntorch.OutOfMemoryError: CUDA out of memory. Tried"),
        "killed": PeerError("the run ended with code -9 at 'measure':\na warning"),
        "wrong": PeerError("the run failed:\nTraceback\nKeyError: 'x'\n"),
    }
    cases = [case_named(name) for name in (*errors, "good")]
    _, found = run_with(lambda c: errors.get(c.name, MEASURED), cases, monkeypatch=monkeypatch)
    assert found["memory"].note == "out of memory, which the plan did not see"
    assert found["killed"].note == "failed: the run ended with code -9 at 'measure':"
    assert found["wrong"].note == "failed: KeyError: 'x'"
    assert (found["good"].measured, found["good"].note) == (MEASURED, "")


def test_a_budget_is_spent_on_the_first_ones_and_the_rest_is_said(monkeypatch):
    now = [0.0]

    def half_a_minute(case):
        now[0] += 25
        return MEASURED

    cases = [case_named("a"), case_named("b", later=2), case_named("c", later=1)]
    budget = Budget(1, 1e15, clock=lambda: now[0])
    asked, found = run_with(half_a_minute, cases, budget, monkeypatch=monkeypatch)
    assert asked == ["a", "c"]
    assert list(found) == ["a", "b", "c"]  # in the order of the table, whatever was first
    # 25 s, of which 13 steps of 0.5 s; another start, and steps at 1e15 FLOP/s
    assert found["b"].note == "cut: about 19 s, 10 s of --minutes are left"


def test_another_loss_than_the_groups_first_is_said(monkeypatch):
    other = dataclasses.replace(MEASURED, first_loss=float("nan"))
    cases = [case_named("first"), case_named("other")]
    _, found = run_with(
        lambda case: other if case.name == "other" else MEASURED, cases, monkeypatch=monkeypatch
    )
    assert found["other"].note == "first loss nan, not 8.3000"


def test_mfu_is_of_the_known_peak_and_else_left_to_the_gemm_rate(monkeypatch):
    _, found = run_with(lambda case: MEASURED, [case_named("a")], monkeypatch=monkeypatch)
    flops = found["a"].planned.flops
    ceilings = Ceilings("x", 0, gemm_tflops=flops / 1e12, copy_gb_per_s=1.0, details={})
    twice = result_table(list(found.values()), 4 * flops / 1e12, ceilings)
    assert "| 50.0%" in twice.replace("200.0%", "")  # two a second, of four
    assert "200.0%" in twice
    unknown = result_table(list(found.values()), None, ceilings)
    assert "50.0%" not in unknown
    assert "200.0%" in unknown


def test_a_cpu_is_for_the_smoke_test(capsys):
    with pytest.raises(SystemExit):
        one_gpu.suite(["--device", "cpu"])
    assert "write --device cpu --smoke" in capsys.readouterr().err
