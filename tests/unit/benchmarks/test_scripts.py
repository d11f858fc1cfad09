"""The benchmarks run as documented, on sizes that take seconds, and their results are what they say."""

import json

import pytest

from benchmarks import checkpoint_stall, growth, optimizer_in_backward
from benchmarks.growth import Axis, fit
from torchtitan.planner.memory import plan_memory


def result(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_optimizer_in_backward_counts_one_unit(ranks, capsys, tmp_path):
    arguments = ["--dim", "64", "--layers", "2", "--steps", "2", "--ranks", str(ranks)]
    optimizer_in_backward.main([*arguments, "--json", str(tmp_path / "found.json")])
    after, early = result(tmp_path / "found.json")["cases"]
    assert after["losses"] == early["losses"]
    assert after["alive_bytes"] == after["all_bytes"] == early["all_bytes"]
    assert early["alive_bytes"] == 4096 * 64 * 4 / ranks  # the largest: the embedding, or the head
    assert early["peak_bytes"] > 100 * 2**20  # a process with torch
    assert "losses equal bit for bit" in capsys.readouterr().out


def test_checkpoint_stall_saves_and_loads_on_fewer_ranks(capsys, tmp_path):
    arguments = [
        "--ranks",
        "2",
        "--load",
        "1",
        "--dim",
        "64",
        "--layers",
        "1",
        "--rounds",
        "1",
        "--steps",
        "1",
    ]
    checkpoint_stall.main([*arguments, "--json", str(tmp_path / "found.json")])
    found = result(tmp_path / "found.json")
    assert found["bytes"] > 3 * 4 * 2 * 4096 * 64  # embedding and head, with two states each
    for kind in ("sync", "async"):
        (save,) = found["saves"][kind]
        assert 0 < save["stall_s"] <= save["complete_s"]
    (load,) = found["loads"]
    assert (load["ranks"], load["held_bytes"] > 0) == (1, True)
    assert "stall async / sync: " in capsys.readouterr().out


def test_a_checkpoint_that_is_loaded_wrongly_is_noticed(tmp_path, monkeypatch):
    def ask(_, question, **__):
        return {"checksum": [1.0], "load": [{"load_s": 1.0}]}[question]

    monkeypatch.setattr(checkpoint_stall.Ranks, "ask", ask)
    monkeypatch.setattr(checkpoint_stall.Ranks, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(checkpoint_stall.Ranks, "close", lambda _: None)
    args = type("Args", (), {"ranks": 2, "load": [1], "dim": 64, "layers": 1})
    with pytest.raises(SystemExit, match=r"1 ranks loaded 1\.0, but 2\.0 was saved"):
        checkpoint_stall.loads(args, "somewhere", 2.0)


def test_growth_measures_counts_and_fits(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(growth.AXES, "rows", Axis("per row", (1, 2), growth._rows))
    monkeypatch.setitem(growth.AXES, "ranks", Axis("/ ranks", (2, 4), growth._rows, timed=False))
    out = tmp_path / "found.json"
    growth.main(["--axes", "rows", "ranks", "--rounds", "1", "--json", str(out)])
    axes = result(out)["axes"]
    rows, ranks = axes["rows"]["points"], axes["ranks"]["points"]
    assert all(point["seconds"]["median"] > 0 for point in rows)
    assert [point["seconds"] for point in ranks] == [None, None]
    for point in (*rows, *ranks):
        assert point["planned"] == pytest.approx(point["counted"], rel=0.03)
    assert rows[1]["flops"] == 2 * rows[0]["flops"]
    assert axes["rows"]["fits"]["flops"]["exponent"] == pytest.approx(1)
    assert ranks[1]["counted"] < ranks[0]["counted"]
    assert "not measured" in capsys.readouterr().out


def test_growth_plans_the_run_that_it_measures():
    config = growth.config_of(growth.AXES["layers"], 16, "full")
    assert config.model.n_layers == 16
    small = growth.config_of(growth.AXES["layers"], 2, "full")
    assert plan_memory(config, 1).total > plan_memory(small, 1).total


def test_a_fit_finds_the_line_and_the_power():
    values = [1, 2, 4, 8]
    line = fit(values, [5 + 3 * value for value in values])
    assert (line.slope, line.intercept) == pytest.approx((3, 5))
    power = fit(values, [2 * value**1.5 for value in values])
    assert (power.exponent, power.last) == pytest.approx((1.5, 1.5))
    shared = fit(values, [7 + 12 / value for value in values], shared=True)
    assert (shared.slope, shared.intercept) == pytest.approx((12, 7))
