"""A ``kill -9`` at any moment of a save leaves the previous checkpoint whole and chosen, or the new one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_everywhere.py")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("step", "mode"), [(20, "sync"), (20, "async"), (10, "sync")])
def test_killed_at_every_file_operation(tmp_path, step, mode):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(step), mode]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout)

    n_before, n_after = chosen.count(10), chosen.count(20)
    assert chosen == [10] * n_before + [20] * n_after  # one point in time makes the new one valid
    assert n_before >= 12  # data writes, syncs and renames before the commit
    assert n_after > 3  # the deletion of the old one after it, and the undisturbed save
