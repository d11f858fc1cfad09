"""Files on disk: hashed while they are written, durable when closed, compared with their record later."""

import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest keeps of a file.

    Attributes:
        n_bytes: its size.
        sha256: hex digest of its content.
    """

    n_bytes: int
    sha256: str


class HashedFile(io.BufferedIOBase):
    """A new file, written from start to end; its hash is ready when it is closed, and it is on the disk then."""

    def __init__(self, path: Path) -> None:
        """Create ``path``, which must not exist."""
        self._file = path.open("xb")
        self._sha256 = hashlib.sha256()
        self._n_bytes = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any, /) -> int:
        """Append ``data`` (bytes-like) and hash it."""
        self._sha256.update(data)
        written = self._file.write(data)
        self._n_bytes += written
        return written

    def tell(self) -> int:
        """Bytes written so far; `torch.save` and DCP take their offsets from it."""
        return self._n_bytes

    def close(self) -> None:
        """Flush, fsync, close."""
        if self.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            super().close()
            self._file.close()

    def record(self) -> FileRecord:
        """Size and hash of what was written."""
        return FileRecord(self._n_bytes, self._sha256.hexdigest())


@dataclass(slots=True)
class HashedFiles:
    """The files that one rank writes into one checkpoint, with their records by file name."""

    records: dict[str, FileRecord] = field(default_factory=dict)

    @contextmanager
    def create(self, path: Path) -> Generator[HashedFile]:
        """Open a new file; it is durable and recorded when the block ends.

        Raises:
            OSError: if it cannot be written; names the file.
        """
        try:
            with HashedFile(path) as file:
                yield file
        except (OSError, RuntimeError) as error:
            # torch.save reports a failed write as RuntimeError("unexpected pos ..."); the cause is behind it.
            failed = error if isinstance(error, OSError) else error.__context__
            if not isinstance(failed, OSError):
                raise
            raise OSError(failed.errno, failed.strerror, str(path)) from error
        self.records[path.name] = file.record()

    def rename(self, path: Path, new_path: Path) -> None:
        """Rename a written file together with its record."""
        os.rename(path, new_path)
        self.records[new_path.name] = self.records.pop(path.name)


def damage_of(path: Path, record: FileRecord, *, verify_hash: bool) -> str | None:
    """What is wrong with the file, in words; None if it is as recorded."""
    try:
        n_bytes = path.stat().st_size
        if n_bytes != record.n_bytes:
            return f"{path.name} has {n_bytes} bytes instead of {record.n_bytes}"
        if verify_hash:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != record.sha256:
                return f"{path.name} has sha256 {found[:12]}... instead of {record.sha256[:12]}..."
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    return None


def sync_folder(path: Path) -> None:
    """Make the entries of a folder (created, renamed or removed files) durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
