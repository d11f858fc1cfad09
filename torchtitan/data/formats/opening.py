"""Which format a file has, and opening it; a new format is one more entry in `FORMATS`."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torchtitan.data.cache import cached_copy
from torchtitan.data.formats.csv_rows import open_csv
from torchtitan.data.formats.json_rows import open_json, open_json_lines
from torchtitan.data.formats.parquet import open_parquet
from torchtitan.data.formats.rows import FileOptions, Rows
from torchtitan.data.formats.text import open_text
from torchtitan.errors import DataError
from torchtitan.optional import require

FORMATS: dict[str, Callable[[Path, Path, FileOptions], Rows]] = {
    ".jsonl": open_json_lines,
    ".ndjson": open_json_lines,
    ".json": open_json,
    ".csv": open_csv,
    ".parquet": open_parquet,
    ".txt": open_text,
}
"""Extension -> how to open such a file: from the file, the name to show for it, and the options."""

PACKAGES = {".parquet": "pyarrow", ".zst": "zstandard"}
"""Extension -> the optional package that it needs."""

_COMPRESSED = (".gz", ".zst")
_CHUNK_BYTES = 1 << 20


def known_extensions(path: Path) -> list[str]:
    """The extensions of ``path`` that decide how it is read (``[".jsonl", ".gz"]``); empty for an unknown format."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] if suffixes[-1:] and suffixes[-1] in _COMPRESSED else []
    plain = suffixes[len(suffixes) - len(compressed) - 1 : len(suffixes) - len(compressed)]
    if not plain or plain[0] not in FORMATS or (compressed and plain[0] == ".parquet"):
        return []
    return plain + compressed


def open_rows(path: Path, options: FileOptions) -> Rows:
    """Open a file of a known format; a compressed one is decompressed once into the cache.

    Raises:
        DataError: if it cannot be read.
    """
    extensions = known_extensions(path)
    plain = path
    if extensions[-1] in _COMPRESSED:
        write = partial(_decompress, path, extensions[-1])
        plain = cached_copy(
            path, suffix=extensions[0], variant="", folder=options.cache_folder, write=write
        )
    try:
        return FORMATS[extensions[0]](plain, path, options)
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not give out."""
    reason = error.strerror or str(error)
    return DataError(f"{path}: cannot be read ({reason}); check the file and its permissions")


def _decompress(path: Path, compression: str, copy: Path) -> None:
    chunks = _gzip_chunks(path) if compression == ".gz" else _zstandard_chunks(path)
    with copy.open("wb") as out:
        for chunk in chunks:
            out.write(chunk)


def _gzip_chunks(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); restore or remove it") from error


def _zstandard_chunks(path: Path) -> Iterator[bytes]:
    zstandard = require("zstandard", extra="data", purpose="reading .zst files")
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                while data:
                    if decompressor.eof:  # one frame ended, another begins
                        decompressor = zstandard.ZstdDecompressor().decompressobj()
                    yield decompressor.decompress(data)
                    data = decompressor.unused_data
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: damaged zstd file ({error}); restore or remove it") from error
    if not decompressor.eof and path.stat().st_size > 0:
        raise DataError(
            f"{path}: damaged zstd file (it ends in the middle of a frame); restore or remove it"
        )
