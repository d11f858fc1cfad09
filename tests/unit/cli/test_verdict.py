import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.cli.ending import Ending
from torchtitan.cli.ranks import RankProcess
from torchtitan.cli.verdict import verdict

AGAIN = "run the same command again to resume from the last checkpoint"
LOST = Ending(6, "a collective failed")


@pytest.fixture
def ended(tmp_path: Path):
    """Make a rank whose process has ended with a code (minus a signal's number), and what it said."""

    def make(rank: int, code: int, said: Ending | None = None, *, by_us=False, errors=""):
        end = f"os.kill(os.getpid(), {-code})" if code < 0 else f"os._exit({code})"
        process = subprocess.Popen([sys.executable, "-c", f"import os; {end}"])
        process.wait()
        report = tmp_path / f"{rank}.json"
        if said:
            said.write(report)
            os.utime(report, (rank + 1, rank + 1))
        stderr = tmp_path / f"{rank}.stderr"
        stderr.write_text(errors, encoding="utf-8")
        return RankProcess(rank, process, report, stderr, ended_by_us=by_us)

    return make


def test_all_done(ended):
    assert verdict([ended(0, 0), ended(1, 0)], stopped=False) == Ending(0, "")


def test_an_error_of_its_own_is_the_cause_not_the_loss_of_a_partner(ended):
    ranks = [ended(0, 6, LOST), ended(1, 3, Ending(3, "no data")), ended(2, 5, Ending(5, "nan"))]
    assert verdict(ranks, stopped=False) == Ending(3, "rank 1: no data")
    assert verdict(ranks, stopped=True).code == 3


def test_a_killed_rank_is_the_cause_if_no_rank_had_an_error_of_its_own(ended):
    text = f"rank 1 was killed by SIGKILL (the system's out-of-memory killer sends it); {AGAIN}"
    assert verdict([ended(0, 6, LOST), ended(1, -9)], stopped=False) == Ending(6, text)


def test_a_rank_that_says_nothing_shows_the_end_of_its_stderr(ended):
    text = f"rank 0 was killed by SIGABRT; {AGAIN}\n  | one\n  | two"
    assert verdict([ended(0, -6, errors="one\ntwo\n")], stopped=False) == Ending(6, text)
    ending = verdict([ended(1, 9)], stopped=False)
    assert ending == Ending(6, f"rank 1 ended with exit code 9 and no message; {AGAIN}")
    assert verdict([ended(2, 1, errors="ImportError")], stopped=False).code == 1


def test_a_rank_that_hung_is_named_beside_the_rank_that_waited_for_it(ended):
    hung = ended(1, -9, by_us=True, errors="File x in y")
    assert verdict([ended(0, 6, LOST), hung], stopped=False) == Ending(
        6, "rank 0: a collective failed\nrank 1 did not answer and was ended\n  | File x in y"
    )


def test_ranks_that_were_stopped_are_preempted_also_if_one_lost_its_partner(ended):
    saved = Ending(7, "saved step 5")
    assert verdict([ended(0, 7, saved), ended(1, 7, saved)], stopped=True) == saved
    assert verdict([ended(0, 6, LOST), ended(1, 7, saved)], stopped=True) == saved
    assert verdict([ended(2, 7, saved), ended(3, 0)], stopped=False) == saved


def test_ranks_that_were_stopped_before_they_could_save(ended):
    assert verdict([ended(0, -15), ended(1, -15)], stopped=True) == Ending(
        7, f"stopped at once; {AGAIN}"
    )


def test_a_rank_that_outlives_its_grace_is_named(ended):
    ranks = [ended(0, 7, Ending(7, "saved")), ended(1, -9, by_us=True)]
    ending = verdict(ranks, stopped=True)
    assert ending.code == 6
    assert ending.text == (
        "rank 1 did not stop in time after SIGTERM and was killed; "
        f"allow more time to save with TORCHTITAN_GRACE_S, or {AGAIN}"
    )
