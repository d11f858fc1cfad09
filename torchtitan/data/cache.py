"""Plain copies of files that cannot be read at any place (compressed ones, Parquet), made once per machine."""

import fcntl
import hashlib
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from torchtitan.errors import DataError

log = logging.getLogger(__name__)

DEFAULT_FOLDER = "~/.cache/torchtitan"


def cached_copy(
    path: Path, *, suffix: str, variant: str, folder: str | None, write: Callable[[Path], None]
) -> Path:
    """The copy of ``path``, made by ``write`` if there is none yet.

    The copy belongs to the file's absolute path, size and modification time, so a changed file gets
    a new one. Several processes may ask at once: one writes, the others wait for it.

    Args:
        path: the original.
        suffix: ending of the copy's name.
        variant: what else decides its content, such as the column that is kept.
        folder: where copies are; None is ``~/.cache/torchtitan``.
        write: writes the copy to the path that it is given.

    Raises:
        DataError: if the original or the folder does not allow it.
    """
    home = Path(folder or DEFAULT_FOLDER).expanduser()
    try:
        stat = path.stat()
        identity = repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns, variant))
        name = f"{path.name.partition('.')[0]}-{hashlib.sha256(identity.encode('utf-8')).hexdigest()[:16]}"
        copy = home / (name + suffix)
        if copy.exists():
            return copy
        home.mkdir(parents=True, exist_ok=True)
        with (home / f"{name}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                _write_whole(copy, write)
                log.info("made %s, a plain copy of %s (%d bytes)", copy, path, copy.stat().st_size)
    except OSError as error:
        raise DataError(
            f"{path}: cannot make its plain copy in {home} ({error}); free some space there, or set cache_folder"
        ) from error
    return copy


def _write_whole(copy: Path, write: Callable[[Path], None]) -> None:
    """Under a temporary name first: a copy that has its name is complete."""
    temporary = copy.with_name(f"{copy.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        os.replace(temporary, copy)
    finally:
        temporary.unlink(missing_ok=True)
