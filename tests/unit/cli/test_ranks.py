import signal
import subprocess
import sys

BECOME = "import os, signal, sys\nfrom torchtitan.cli.ranks import be_a_rank\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BECOME + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_rank_writes_where_it_is_when_asked():
    done = run("be_a_rank(os.getppid())\nsignal.raise_signal(signal.SIGUSR1)\nsys.exit(3)")
    assert done.returncode == 3
    assert "most recent call first" in done.stderr
    assert 'File "<string>", line 4' in done.stderr


def test_a_rank_whose_launcher_has_gone_ends():
    assert run("be_a_rank(1)").returncode == -signal.SIGTERM


def test_a_rank_writes_whole_lines():
    done = run("be_a_rank(os.getppid())\nprint('a')\nos._exit(0)")
    assert done.stdout == "a\n"
