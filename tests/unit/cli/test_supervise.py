"""The launcher's loop over small processes that are no ranks."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from torchtitan.cli import launch
from torchtitan.cli.ending import Ending
from torchtitan.cli.ranks import RankProcess

OBEDIENT = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + OBEDIENT
COUNTING = (
    "import signal, sys, time\n"
    "count = 0\n"
    "def handle(number, frame):\n    global count\n    count += 1\n    if count == 2: sys.exit(7)\n"
    "signal.signal(signal.SIGTERM, handle)\nprint('up', flush=True)\n"
    "while True: time.sleep(0.05)"
)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a process that runs a line of Python as rank n."""
    monkeypatch.setattr(launch, "SETTLE_S", 0.3)
    monkeypatch.setattr(launch, "KILL_S", 0.3)
    ranks = []

    def run(code: str) -> RankProcess:
        number = len(ranks)
        process = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        assert process.stdout
        if "'up'" in code:
            process.stdout.readline()
        ranks.append(RankProcess(number, process, tmp_path / f"{number}.json", None))
        return ranks[-1]

    yield run
    for rank in ranks:
        rank.kill_what_is_left()
        rank.process.stdout.close()


def supervise(ranks: list[RankProcess], *signals: signal.Signals) -> int:
    """Supervise until all have ended, with these signals arriving; return the number of those counted."""
    main = threading.get_ident()

    def send() -> None:
        for number in signals:
            time.sleep(0.3)
            signal.pthread_kill(main, number)

    sender = threading.Thread(target=send)
    with launch._StopRequests() as stop:
        sender.start()
        launch._supervise(ranks, stop)
        sender.join()
    return stop.count


def codes(ranks: list[RankProcess]) -> list[int]:
    return [rank.process.returncode for rank in ranks]


def test_it_ends_when_all_have_ended(start):
    ranks = [start("pass"), start("import time; time.sleep(0.2)")]
    assert supervise(ranks) == 0
    assert codes(ranks) == [0, 0]


def test_after_a_failure_the_others_are_ended_and_not_blamed(start):
    ranks = [start(OBEDIENT), start(STUBBORN), start("raise SystemExit(3)")]
    supervise(ranks)
    assert codes(ranks) == [-signal.SIGUSR1, -signal.SIGUSR1, 3]  # these do not handle it
    assert [rank.ended_by_us for rank in ranks] == [True, True, False]


def test_a_rank_that_has_said_why_it_failed_gets_time_to_close(start, monkeypatch):
    monkeypatch.setattr(launch, "CLOSE_S", 1.0)
    failing, waiting = start(STUBBORN), start(OBEDIENT)
    Ending(3, "no data").write(failing.report)
    begin = time.monotonic()
    supervise([failing, waiting])
    assert codes([failing, waiting]) == [-signal.SIGKILL, -signal.SIGTERM]
    assert (failing.ended_by_us, waiting.ended_by_us) == (False, True)
    assert time.monotonic() - begin > 1.0


def test_ranks_that_end_in_time_after_a_failure_are_left_alone(start):
    ranks = [start("import time; time.sleep(0.1); raise SystemExit(6)"), start("exit(3)")]
    supervise(ranks)
    assert codes(ranks) == [6, 3]
    assert not any(rank.ended_by_us for rank in ranks)


def test_ranks_that_are_done_or_preempted_do_not_hurry_the_others(start):
    ranks = [start("exit(7)"), start("exit(0)"), start("import time; time.sleep(1)")]
    supervise(ranks)
    assert codes(ranks) == [7, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_forwarded_as_sigterm(start, number):
    ranks = [start(OBEDIENT), start(OBEDIENT)]
    assert supervise(ranks, number) == 1
    assert codes(ranks) == [-signal.SIGTERM] * 2


def test_each_signal_is_forwarded_once(start):
    ranks = [start(COUNTING)]
    assert supervise(ranks, signal.SIGINT, signal.SIGINT) == 2
    assert codes(ranks) == [7]


def test_a_rank_that_outlives_its_grace_is_killed(start, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_GRACE_S", "1")
    ranks = [start(STUBBORN)]
    supervise(ranks, signal.SIGTERM)
    assert codes(ranks) == [-signal.SIGKILL]
    assert ranks[0].ended_by_us


def test_what_a_rank_leaves_behind_is_killed(start):
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('up', child.pid, flush=True)"
    )
    rank = start(code)
    rank.process.wait()
    rank.kill_what_is_left()
    start_time = time.monotonic()
    assert rank.process.stdout
    rank.process.stdout.read()  # returns once nobody holds its stdout any more
    assert time.monotonic() - start_time < 30


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with launch._StopRequests():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
