"""Whole launches of two gloo ranks; each costs seconds, so each checks all it can."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchtitan import train
from torchtitan.cli.launch import _place
from torchtitan.cli.seat import Seat
from torchtitan.environment import RankPlace

ROOT = Path(train.__file__).parent.parent
TRAIN = [sys.executable, "-m", "torchtitan.train", "--module", "tests.unit.cli.toy_run"]
TRAIN += ["--config", "toy_run", "--ngpu", "2"]


@contextlib.contextmanager
def launched(*arguments: str, tmp_path: Path, **variables: str):
    """A launch in a session of its own, with a temporary folder of its own."""
    unset = {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE"}
    environ = {k: v for k, v in os.environ.items() if k not in unset}
    environ |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen(
        [*TRAIN, *arguments],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def launch(*arguments: str, tmp_path: Path, **variables: str) -> tuple[int, str, str]:
    with launched(*arguments, tmp_path=tmp_path, **variables) as process:
        out, err = process.communicate(timeout=300)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []  # no temporary files stay
    return process.returncode, out, err


def processes_of(tmp_path: Path) -> list[int]:
    """Processes that were started with this temporary folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={tmp_path}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def test_ranks_work_together_and_the_chosen_ones_are_shown(tmp_path):
    code, out, err = launch("--log-rank", "1", tmp_path=tmp_path)
    assert code == 0
    assert out.splitlines() == ["sum 2", "rank 1 of 2 in outputs/toy_run", "closed 1"]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"threads {threads}\n" in err
    assert "recipe tests.unit.cli.toy_run:toy_run" in err
    assert "rank 0" not in err


def test_ranks_are_numbered_over_all_machines():
    seat = Seat(node_rank=2, address="h", port=5, store_is_served=False, held=None)
    assert _place(seat, local_rank=1, ranks_here=4, nnodes=3) == RankPlace(
        9, 1, 12, 4, 2, "h", 5, False
    )


def test_the_error_of_one_hidden_rank_is_told_once_and_decides_the_code(tmp_path):
    code, out, err = launch("--act", "data", "--on-rank", "1", tmp_path=tmp_path)
    assert code == 3
    assert err.splitlines()[-1] == "error: rank 1: no rows in x.jsonl; give some"
    assert err.count("no rows") == 1
    assert "Traceback" not in err
    assert out == "rank 0 of 2 in outputs/toy_run\nclosed 0\n"


def test_a_killed_rank_is_named(tmp_path):
    code, _, err = launch("--act", "kill", "--on-rank", "1", tmp_path=tmp_path)
    assert code == 6
    assert "error: rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err


def test_ctrl_c_is_forwarded_once_as_sigterm_and_ends_as_preempted(tmp_path):
    arguments = ["--act", "sleep", "--log-rank", "all"]
    with launched(*arguments, tmp_path=tmp_path) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().partition(" ")[0] for _ in range(2)] == ["ready"] * 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher's whole group
        out, err = process.communicate(timeout=300)
    assert process.returncode == 7
    assert err.splitlines()[-1] == "saved step 5 after SIGTERM"
    assert sorted(out.split()) == ["0", "1", "closed", "closed"]
    assert processes_of(tmp_path) == []


def test_a_launcher_that_is_killed_leaves_no_ranks(tmp_path):
    with launched("--act", "sleep", "--log-rank", "all", tmp_path=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 120
        while processes_of(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(tmp_path) == []
