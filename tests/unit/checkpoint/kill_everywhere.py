"""Kill a saving process at each of its file operations in turn; run as a script by test_kill.py.

The process is forked for each try, so that torch is imported once. Prints, as JSON, which value was chosen after
each kill; the last try ran to its end.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.files import HashedFile

OPERATIONS = [
    (os, "mkdir"),
    (os, "rename"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "rmdir"),
    (HashedFile, "write"),
]
SMALL_WRITE = 1000  # bytes: the many headers inside a file are one moment


def kill_before_operation(number: int) -> None:
    """SIGKILL this process when it begins its ``number``-th file operation from now, counted from 1."""
    left = number
    write = HashedFile.write

    def counting(operation):
        def counted(*args, **kwargs):
            nonlocal left
            small = operation is write and len(args[1]) < SMALL_WRITE
            left -= not small
            if left == 0 and not small:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return counted

    for owner, name in OPERATIONS:
        setattr(owner, name, counting(getattr(owner, name)))


def save(checkpointer: Checkpointer, step: int, value: float) -> None:
    tensors = {f"layers.{index}": torch.full((64, 64), value) for index in range(3)}
    checkpointer.save(step, tensors, {}, {"value": value})
    checkpointer.wait()


def chosen_value(folder: Path) -> float:
    """What a restarted process finds; it fails unless that is whole and nothing is left over."""
    checkpointer = Checkpointer.Config().build(folder=folder)
    path = checkpointer.resolve("latest")
    assert path is not None
    tensors = {f"layers.{index}": torch.zeros(64, 64) for index in range(3)}
    checkpointer.load(path, tensors, {})
    value = checkpointer.read_state(path)["value"]
    assert all(tensor.eq(value).all() for tensor in tensors.values())
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names[-1] == path.name, names
    assert all("." not in name for name in names), names
    return value


def main(folder: Path, step: int, async_save: bool) -> list[float]:
    """Step 10 (value 10) exists; save ``step`` (value 20), killed at the 1st, 2nd, ... operation."""
    torch.set_num_threads(1)
    save(Checkpointer.Config().build(folder=folder / "warm"), 1, 1.0)
    chosen = []
    number = 0
    while True:
        number += 1
        run_folder = folder / str(number)
        save(Checkpointer.Config().build(folder=run_folder), 10, 10.0)
        child = os.fork()
        if child == 0:
            config = Checkpointer.Config(keep_latest=1, async_save=async_save)
            checkpointer = config.build(folder=run_folder)
            kill_before_operation(number)
            save(checkpointer, step, 20.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        chosen.append(chosen_value(run_folder))
        shutil.rmtree(run_folder)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return chosen
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    chosen_values = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "async")
    sys.stdout.write(json.dumps(chosen_values))
