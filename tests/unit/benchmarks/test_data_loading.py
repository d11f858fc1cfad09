"""The data benchmark runs as documented, on sizes that take seconds; what differs is not compared."""

import json

import pytest

from benchmarks import data_loading


def test_seeking_and_tokenising_of_a_few_rows(capsys, tmp_path):
    out = tmp_path / "found.json"
    arguments = ["--rounds", "1", "--rows", "3000", "--texts", "12", "--chats", "20"]
    data_loading.main(
        [*arguments, "--only", "tokenise", "seek", "--without-peer", "--json", str(out)]
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["seek"]) == 6
    for name, numbers in found["seek"].items():
        assert numbers["seconds"]["median"] > 0, name
    for kind in ("text", "chat"):
        alone = found["tokenise"][kind]["torchtitan, 1 process"]
        assert alone["million_tokens_per_s"]["median"] > 0
        assert alone["cpu_time_over_ours"]["median"] == 1
    assert "from a state to the first batch" in capsys.readouterr().out


def test_other_ids_are_noticed():
    one, other = {"tokens": 5, "hash": "a" * 64}, {"tokens": 5, "hash": "b" * 64}
    data_loading.check_same({"ours": one, "theirs": one})
    with pytest.raises(SystemExit, match=r"token ids differ \(ours 5 tokens aaaaaaaa, .*; nothing"):
        data_loading.check_same({"ours": one, "theirs": other})


def test_waiting_is_summed_without_the_first_step():
    rows = [{"data_wait_s": 9.0, "seconds_per_step": 10.0}] + [
        {"data_wait_s": wait, "seconds_per_step": 1.0} for wait in (0.0, 0.01, 0.02, 0.03)
    ]
    found = data_loading.wait_of(rows)
    assert found["share"] == pytest.approx(0.015)
    assert found["first_wait_s"] == 9.0
    assert found["worst_quarter"] == pytest.approx(0.0225)


@pytest.mark.slow
def test_a_run_tells_how_long_it_waited(tmp_path, capsys):
    out = tmp_path / "found.json"
    data_loading.main(["--only", "wait", "--steps", "12", "--json", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))["wait"]
    assert len(found) == 6
    assert all(0 <= numbers["share"] < 1 for numbers in found.values())
