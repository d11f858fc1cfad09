"""The seam to torch's distributed checkpoints (DCP): writer, reader, and the one pickle that DCP has.

DCP is slow to import, so the classes that derive from it are made on first use.
"""

import functools
import pickle
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchtitan import torch_api
from torchtitan.checkpoint.agreement import Agreement, cause
from torchtitan.checkpoint.files import FileRecord, HashedFiles
from torchtitan.checkpoint.matching import TensorInfo
from torchtitan.errors import CheckpointError, DistributedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
"""What the pickle of DCP's metadata is made of, besides dtypes: data classes without side effects."""


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy this rank's part of every tensor to the CPU, so that training may change the originals.

    Returns:
        Tensors of the same shapes, dtypes and shardings; copies of CUDA tensors are in pinned memory.
    """
    copies = {}
    for name, tensor in tensors.items():
        source = tensor.detach()
        copies[name] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        copies[name].copy_(source, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()  # sync
    return copies


class Reads(Protocol):
    """Gives the values of a tensor that is known by its shape and type so far."""

    def __call__(self, name: str) -> Tensor:
        """The tensor ``name``, on the CPU, in memory of its own; it is emptied when it is written."""
        ...


def write_tensors(
    ranks: Agreement,
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    staged: bool,
    read: Reads | None = None,
) -> tuple[dict[str, FileRecord], dict[str, TensorInfo]]:
    """Write this rank's part of ``tensors``; replicated ones are written by one rank each. Collective.

    Args:
        ranks: of the run.
        folder: to write to.
        tensors: by name.
        staged: they are copies on the CPU.
        read: where tensors on the meta device get their values, one after the other, when it is their turn.

    Returns:
        The files of all ranks, and all tensors of the checkpoint.

    Raises:
        CheckpointError: on all ranks, if any rank could not write.
    """
    files = HashedFiles()
    # A staged save runs in a thread that must not touch the GPU, and what is read shall not be read ahead: without copy-ahead DCP
    # does neither.
    ahead = 0 if staged or read is not None else 10_000_000
    writer = _writer_class()(folder, files, copy_ahead_bytes=ahead)
    planner = _planner_class()(read)
    # Saving without a process group is what is meant.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        metadata = torch_api.dcp.state_dict_saver.save(
            tensors,
            storage_writer=writer,
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except torch_api.dcp.api.CheckpointException as error:  # on all ranks, whichever failed
        failures = {rank: cause(failure) for rank, (failure, _) in error.failures.items()}
        raise CheckpointError(ranks.describe(failures)) from error
    except RuntimeError as error:
        raise DistributedError(f"another rank is gone or did not answer: {error}") from error
    records: dict[str, FileRecord] = {}
    for of_rank in ranks.each("collecting the hashes", lambda: files.records):
        records.update(of_rank)
    return records, tensors_in(metadata)


def read_tensors(folder: Path, metadata: "Metadata", tensors: dict[str, Tensor]) -> None:
    """Read this rank's part of every tensor into it, whatever the sharding was when it was saved.

    Not collective: each rank reads for itself, and the caller makes the ranks agree on the outcome.

    Raises:
        CheckpointError: if a file cannot be read.
    """
    reader = _reader_class()(folder, metadata)
    planner = torch_api.dcp.default_planner.DefaultLoadPlanner(flatten_state_dict=False)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        torch_api.dcp.state_dict_loader.load(
            tensors, storage_reader=reader, planner=planner, no_dist=True
        )
    except torch_api.dcp.api.CheckpointException as error:
        raise CheckpointError(
            "; ".join(cause(failure) for failure, _ in error.failures.values())
        ) from error


def read_metadata(folder: Path) -> "Metadata":
    """Read DCP's description of the shards, without running anything that the file asks for.

    Raises:
        CheckpointError: if the file is not readable, or names anything but the classes of the description.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {cause(error)}") from error
    if type(metadata) is not torch_api.dcp.metadata.Metadata:
        raise CheckpointError(
            f"{path} is refused: it holds a {type(metadata).__name__}, not the metadata of DCP"
        )
    outside = {info.relative_path for info in (metadata.storage_data or {}).values()}
    outside = {file for file in outside if Path(file).name != file}
    if outside:
        raise CheckpointError(f"{path} is refused: it points outside its folder, to {min(outside)}")
    return metadata


def tensors_in(
    metadata: "Metadata", file: str | None = None, from_byte: int = 0
) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint; with ``file``, those with a part in it that ends after ``from_byte``."""
    names = set(metadata.state_dict_metadata)
    if file is not None:
        names = {
            index.fqn
            for index, info in (metadata.storage_data or {}).items()
            if info.relative_path == file and info.offset + info.length > from_byte
        }
    found = {}
    for name in sorted(names):
        stored: Any = metadata.state_dict_metadata[name]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        found[name] = TensorInfo(tuple(stored.size), dtype)
    return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        allowed = (module_name, global_name) in _ALLOWED
        is_dtype = module_name == "torch" and isinstance(
            getattr(torch, global_name, None), torch.dtype
        )
        if not allowed and not is_dtype:
            raise CheckpointError(
                f"its pickle asks for {module_name}.{global_name}, which is no part of DCP's metadata; nothing of "
                "it was run. The file was tampered with, or a newer torch wrote it"
            )
        return super().find_class(module_name, global_name)


@functools.cache
def _planner_class() -> "Callable[..., DefaultSavePlanner]":
    class ReadingPlanner(torch_api.dcp.default_planner.DefaultSavePlanner):
        def __init__(self, read: Reads | None) -> None:
            super().__init__(flatten_state_dict=False)
            self.read = read
            self._written: Tensor | None = None

        def lookup_object(self, index: Any) -> Any:
            """The tensor of a planned write, which is about to happen; that of the one before is on the disk."""
            found = super().lookup_object(index)
            if self.read is None or not found.is_meta:
                return found
            # The writer keeps the tensors of a file until it is closed.
            if self._written is not None:
                self._written.untyped_storage().resize_(0)
            self._written = self.read(index.fqn)
            return self._written

    return ReadingPlanner


@functools.cache
def _writer_class() -> "Callable[..., FileSystemWriter]":
    class HashingFileSystem(torch_api.dcp.filesystem.FileSystem):
        def __init__(self, files: HashedFiles) -> None:
            self.files = files

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Generator[Any]:
            if mode != "wb":
                raise ValueError(f"mode={mode!r}: the checkpoint writer only writes new files")
            with self.files.create(Path(path)) as file:
                yield file

        def rename(self, path: Any, new_path: Any) -> None:
            self.files.rename(Path(path), Path(new_path))

    class HashingWriter(torch_api.dcp.filesystem.FileSystemWriter):
        def __init__(self, folder: Path, files: HashedFiles, copy_ahead_bytes: int) -> None:
            # sync_files: DCP syncs before it flushes; HashedFile does it in the right order.
            super().__init__(
                folder, sync_files=False, per_thread_copy_ahead=copy_ahead_bytes, overwrite=False
            )
            self.fs = HashingFileSystem(files)

        def storage_meta(self) -> None:
            """Nothing: it would put the temporary folder's path into the pickle."""
            return

    return HashingWriter


@functools.cache
def _reader_class() -> "Callable[..., FileSystemReader]":
    class SafeReader(torch_api.dcp.filesystem.FileSystemReader):
        def __init__(self, folder: Path, metadata: "Metadata") -> None:
            super().__init__(folder)
            self.metadata = metadata

        def read_metadata(self, *_: Any, **__: Any) -> "Metadata":
            """What was read before, safely; DCP's own runs whatever the pickle asks for."""
            return self.metadata

    return SafeReader
