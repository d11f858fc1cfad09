"""The harness of the benchmarks, with workers of this very environment: no peer is installed."""

import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers import (
    PeerError,
    Worker,
    assert_equal,
    environment,
    in_turn,
    machine,
    ratios,
    spread,
    table,
    write_json,
)

WORKER = f"""
import json, os, sys
sys.path.insert(0, {str(peers.WORKERS)!r})
from serving import serve, versions
setup = json.loads(sys.argv[1])

def add(number):
    print("a library prints this")
    os.system("echo and a child process that")
    return setup["base"] + number

def fail():
    raise KeyError("no such weight")

def end():
    print("last words")
    sys.exit(3)

def hang():
    import time
    time.sleep(60)

serve({{
    "add": add, "fail": fail, "end": end, "hang": hang,
    "path": lambda: os.environ.get("PYTHONPATH"),
    "variable": lambda name: os.environ.get(name),
    "versions": lambda: versions("pytest", "no-such-package"),
}})
"""


LOOP = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(peers.WORKERS)!r})
from serving import Gate, cpu_s

gate = Gate({{"cpu_s": cpu_s}})
last = None
for number in range(3):
    gate.wait(last)
    if number == 1:
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        while cpu_s() < 0.3: time.sleep(0.01)  # by the child, which is alive
        child.kill()
        child.wait()
    last = lambda number=number: 10.0 + number
gate.wait(last)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    return path


def test_a_worker_answers_and_what_it_prints_is_no_answer(script):
    with Worker("toy", script, {"base": 40}, environ={"TOY": "1"}) as worker:
        assert [worker.ask("add", number=n) for n in (1, 2)] == [41, 42]
        assert "a library prints this\nand a child process that\n" in worker.printed()
        assert worker.ask("add", number=3) == 43
        assert worker.printed().count("a library prints this") == 3  # reading moves nothing
        assert worker.ask("versions") == {"pytest": pytest.__version__}
        assert worker.ask("variable", name="TOY") == "1"


def test_an_error_is_told_and_the_worker_goes_on(script):
    with Worker("toy", script, {"base": 1}) as worker:
        with pytest.raises(PeerError, match=r"toy failed at 'fail'(?s:.)*no such weight"):
            worker.ask("fail")
        with pytest.raises(PeerError, match=r"KeyError: 'nothing'"):
            worker.ask("nothing")
        assert worker.ask("add", number=1) == 2


def test_a_worker_that_ends_or_hangs_is_told_with_its_last_words(script):
    with (
        Worker("toy", script) as worker,
        pytest.raises(PeerError, match=r"toy ended with code 3 at 'end':\nlast words"),
    ):
        worker.ask("end")
    with (
        Worker("toy", script, timeout_s=0.5) as worker,
        pytest.raises(PeerError, match=r"toy ended with code -9 at 'hang'"),
    ):
        worker.ask("hang")


def test_a_loop_is_held_between_its_steps(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP, encoding="utf-8")
    with Worker("loop", path) as worker:
        before = worker.ask("cpu_s")
        first = worker.ask("step")
        assert first["loss"] == 10.0
        assert worker.ask("cpu_s") >= before  # other questions are answered in between
        second = worker.ask("step")
        assert second["loss"] == 11.0
        # CPU time of child processes counts while they live and afterwards
        assert second["cpu_s"] > first["cpu_s"]
        assert worker.ask("cpu_s") > 0.1
        assert worker.ask("step")["loss"] == 12.0


def test_only_our_own_worker_sees_our_search_path(script, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    with Worker("ours", script) as worker:
        assert worker.ask("path") == f"{peers.ROOT}:/somewhere"
    with Worker("peer", script, python=Path(sys.executable)) as worker:
        assert worker.ask("path") is None


def test_contestants_are_measured_in_turn_and_warm_up_does_not_count():
    calls = []

    def measure(name):
        calls.append(name)
        return len(calls)

    found = in_turn({n: lambda n=n: measure(n) for n in "abc"}, rounds=2, warmup=1)
    assert "".join(calls) == "abcbcacab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_spread_is_median_and_quartiles():
    assert spread([5, 1, 4, 2, 3]) == peers.Spread(3, 2, 4, 5)
    assert spread([7.0]) == peers.Spread(7, 7, 7, 1)
    assert str(spread([1.0, 2.0])) == "1.500 (1.250-1.750)"
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2, 3]
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_contestants_with_other_losses_are_not_compared():
    assert_equal({"ours": 2.0, "peer": 2.0001}, relative=1e-4)
    for other in (2.001, 1.999, math.nan):
        with pytest.raises(
            SystemExit, match=r"loss differs by more than 0\.0001 of it \(ours 2, peer"
        ):
            assert_equal({"ours": 2.0, "peer": other}, relative=1e-4)


def test_results_are_a_table_and_json(tmp_path):
    assert table([["ours", 1], ["a peer", 22]], header=["who", "n"]).splitlines() == [
        "| who    | n  |",
        "| ------ | -- |",
        "| ours   | 1  |",
        "| a peer | 22 |",
    ]
    path = tmp_path / "result.json"
    write_json(path, {**machine(), "ratio": spread([1.0, 2.0, 3.0])})
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["ratio"] == {"median": 2.0, "lower": 1.5, "upper": 2.5, "n": 3}
    assert {"date", "cpu", "cores", "load_1min", "python"} < found.keys()
    write_json(None, {})


def note_commands(monkeypatch, *, fails=()):
    """Replace the processes that set an environment up; return what they were asked to do."""
    asked = []

    def run(command, check=False):
        words = [Path(w).name if "/" in w else w for w in command]
        asked.append(" ".join(words[words.index("-m") + 1 :]))
        if words[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(parents=True)

        class Done:
            returncode = int(words[-1] in fails)

        return Done()

    monkeypatch.setattr(peers.subprocess, "run", run)
    return asked


def test_an_environment_is_made_once_torch_first(tmp_path, monkeypatch, capsys):
    asked = note_commands(monkeypatch)
    for _ in range(2):
        python = environment("toy", ["a==1", "b==2"], torch="torch==9", folder=tmp_path)
    assert python == tmp_path / "toy" / "bin" / "python"
    pip = "pip install --quiet --disable-pip-version-check -c constraints.txt"
    assert asked == ["venv toy", f"{pip} torch==9", f"{pip} a==1 b==2"]
    assert (tmp_path / "toy" / "constraints.txt").read_text(encoding="utf-8") == "torch==9\n"
    assert "toy: setting up an environment" in capsys.readouterr().err
    environment("toy", ["a==2"], torch="", folder=tmp_path)
    assert asked[3:] == ["venv toy", f"{pip} a==2"]


def test_an_environment_that_failed_is_made_again(tmp_path, monkeypatch):
    asked = note_commands(monkeypatch, fails=["a==1"])
    for _ in range(2):
        with pytest.raises(PeerError, match="toy: a==1 could not be installed"):
            environment("toy", ["a==1"], torch="", folder=tmp_path)
    assert len(asked) == 4


def test_a_requirement_without_a_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'a' has no version; write a==VERSION"):
        environment("toy", ["a"], folder=tmp_path)
