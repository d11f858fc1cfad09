"""The folder of a run's checkpoints: their names, the atomic commit, and what is kept.

``step-00000010`` is complete. Everything else has a suffix and is never chosen:
``.tmp-*`` is being written or deleted, ``.replaced-*`` makes way for a new one of the same step,
``.corrupt`` failed verification, ``.superseded`` belongs to a run that went on from an earlier step.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from torchtitan.checkpoint.files import sync_folder
from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.errors import CheckpointError

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")


class CheckpointFolder:
    """File operations for rank 0; looking is free for all."""

    def __init__(self, path: Path) -> None:
        """Take ``path`` as it is, existing or not."""
        self.path = path
        self._written: set[int] = set()

    @classmethod
    def of_run(cls, run_folder: Path) -> "CheckpointFolder":
        """The checkpoints of the run in ``run_folder``."""
        return cls(run_folder / "checkpoints")

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest step first. The step decides, never a time stamp."""
        found = []
        for path in self.path.glob(f"step-*/{MANIFEST}"):
            match = _STEP.fullmatch(path.parent.name)
            if match:
                found.append((int(match[1]), path.parent))
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """The complete checkpoint with the highest step."""
        return max(self.complete(), key=step_of, default=None)

    def corrupt(self) -> list[Path]:
        """The checkpoints that failed verification, now or in an earlier run."""
        return sorted(self.path.glob("step-*.corrupt*"))

    def probe(self) -> None:
        """Make the folder and write a file in it.

        Raises:
            OSError: if that is not possible.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        probe = self.path / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(b"written to see whether this folder is writable")
        probe.unlink()

    def sweep(self) -> None:
        """Remove what a killed or failed save left; put back what it was about to replace."""
        for path in sorted(self.path.glob("step-*.*")):
            name, _, suffix = path.name.partition(".")
            if suffix.startswith("replaced-") and not (self.path / name).exists():
                os.rename(path, self.path / name)
            elif suffix.startswith(("tmp-", "replaced-")):
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int, n_bytes: int) -> Path:
        """Make the temporary folder for a checkpoint of about ``n_bytes``.

        Raises:
            CheckpointError: if the disk has less free space than that.
        """
        self.sweep()
        free = shutil.disk_usage(self.path).free
        if free < n_bytes:
            raise CheckpointError(
                f"it needs {n_bytes / 2**30:.2f} GiB, but {self.path} has {free / 2**30:.2f} GiB free; "
                "free some space, or keep fewer checkpoints"
            )
        temporary = _with_suffix(self.path / f"step-{step:08d}", "tmp")
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Path) -> Path:
        """Give a finished, durable folder its name, in one rename. An old one of that step goes after it."""
        target = temporary.with_name(temporary.name.partition(".")[0])
        sync_folder(temporary)
        replaced = None
        if target.exists():
            replaced = _with_suffix(target, "replaced")
            os.rename(target, replaced)  # if the process ends here, `sweep` undoes it
        os.rename(temporary, target)
        sync_folder(self.path)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._supersede(step_of(target))
        self._written.add(step_of(target))
        return target

    def set_aside(self, path: Path, suffix: str) -> Path:
        """Rename a checkpoint so that it is kept, but never chosen."""
        aside = path.with_name(f"{path.name}.{suffix}")
        if aside.exists():
            aside = _with_suffix(path, suffix)
        os.rename(path, aside)
        return aside

    def prune(self, keep_latest: int, keep: Callable[[int], bool]) -> None:
        """Delete all but the newest ``keep_latest`` checkpoints and those whose step ``keep`` wants."""
        for path in self.complete()[:-keep_latest]:
            if keep(step_of(path)):
                continue
            try:
                doomed = _with_suffix(path, "tmp")
                os.rename(path, doomed)  # half a checkpoint must not look like one
                shutil.rmtree(doomed)
            except OSError as error:
                log.warning("the old checkpoint %s could not be deleted: %s", path, error)

    def _supersede(self, step: int) -> None:
        """Set aside newer checkpoints that another run wrote: this run went on from before them."""
        for path in self.complete():
            if step_of(path) > step and step_of(path) not in self._written:
                aside = self.set_aside(path, "superseded")
                log.warning(
                    "%s is newer than this run, which is at step %d; it is kept as %s",
                    path,
                    step,
                    aside.name,
                )


def step_of(path: Path) -> int:
    """The step of a complete checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def _with_suffix(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex[:8]}")
