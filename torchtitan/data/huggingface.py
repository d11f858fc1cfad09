"""Data sets of the Hugging Face Hub, or saved by its library; whole or streamed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan.config.configurable import Problem
from torchtitan.data.order import permuted, shuffled
from torchtitan.data.source import BadRow, MapSource, SequentialSource, Source, text_of
from torchtitan.errors import DataError
from torchtitan.optional import is_installed, require

_SHUFFLE_BUFFER_ROWS = 10_000
_READ_ROWS = 64


class HuggingFace(MapSource):
    """The rows of a data set that is on this machine, downloaded at the first use."""

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        """A data set by its name."""

        name: str
        """Name on the hub (`org/name`), or a folder that `save_to_disk` wrote."""
        subset: str | None = None
        """Configuration of the data set, where it has several."""
        split: str = "train"
        """Split to read; slices such as `train[:90%]` work unless it is streamed."""
        text_field: str = "text"
        """Column that holds the text."""
        streaming: bool = False
        """Read it over the network as it is needed, without storing it. Shuffling is then that of a buffer of 10000
        rows, and resuming skips over what was read before."""

        def check(self) -> Iterator[Problem]:
            """The package is installed; whether the data set exists is seen when it is opened."""
            yield from Source.Config.check(self)
            if not is_installed("datasets"):
                yield Problem(
                    "name",
                    self.name,
                    "needs the package 'datasets', which is not installed",
                    "run: pip install 'torchtitan[data]'",
                )
            if self.name.startswith(("/", ".", "~")) and not Path(self.name).expanduser().exists():
                yield Problem(
                    "name",
                    self.name,
                    "does not exist",
                    "name a folder that does, or a data set such as org/name",
                )
            if self.streaming and "[" in self.split:
                yield Problem(
                    "split",
                    self.split,
                    "a streamed split has no slices",
                    "name the whole split, or set streaming=false",
                )

        def build(self) -> "HuggingFace | HuggingFaceStream":
            """Open it, downloading what is needed.

            Raises:
                DataError: if it cannot be had, or has no such column.
            """
            return self._build(whole_rows=False)

        def build_rows(self) -> "HuggingFace | HuggingFaceStream":
            """The same, for whole rows."""
            return self._build(whole_rows=True)

        def _build(self, *, whole_rows: bool) -> "HuggingFace | HuggingFaceStream":
            dataset = _open(self)
            columns = dataset.column_names
            if not whole_rows and columns is not None and self.text_field not in columns:
                raise DataError(
                    f"{self.name}: no column {self.text_field!r}; it has {', '.join(columns)}: set text_field to one of them"
                )
            if self.streaming:
                return HuggingFaceStream(self, dataset, whole_rows=whole_rows)
            return HuggingFace(self, dataset, whole_rows=whole_rows)

    def __init__(self, config: Config, dataset: Any, *, whole_rows: bool = False) -> None:
        self._name = f"{config.name}, split={config.split}"
        self._field = None if whole_rows else config.text_field
        self._dataset = dataset if whole_rows else dataset.select_columns([config.text_field])

    def __len__(self) -> int:
        return len(self._dataset)

    def place(self, index: int) -> str:
        """Name and row."""
        return f"{self._name} row {index + 1}"

    def fingerprint(self) -> str:
        """Name, and what the library computes from the data and all that was done to it."""
        return f"{self._name} {self._dataset._fingerprint}"

    def read(self, index: int) -> Any:
        """Text of row ``index``, or the whole row."""
        place = self.place(index)
        try:
            if self._field is None:
                return self._dataset[index]
            return text_of(self._dataset[index][self._field], place)
        except UnicodeDecodeError as error:
            raise BadRow(
                "invalid_utf8", place, f"byte {error.start} of the text is not UTF-8"
            ) from error

    def describe(self) -> str:
        """Name and size for messages."""
        return f"HuggingFace({self._name}): {len(self)} rows"


class HuggingFaceStream(SequentialSource):
    """The rows of a streamed data set."""

    def __init__(
        self, config: HuggingFace.Config, dataset: Any, *, whole_rows: bool = False
    ) -> None:
        self._name = f"{config.name}, split={config.split}"
        self._field = None if whole_rows else config.text_field
        self._dataset = dataset

    def rows(self, *, start: int, shuffle_seed: int | None) -> Iterator[object]:
        """The text column of one epoch, or the whole rows, from row ``start`` on."""
        if shuffle_seed is None:
            return self._read(self._dataset.skip(start) if start else self._dataset)
        # Shuffled here, since the library's order changes from version to version, and a resumed run relies on it.
        shards = self._read_shards(shuffle_seed)
        return islice(shuffled(shards, _SHUFFLE_BUFFER_ROWS, shuffle_seed), start, None)

    def _read_shards(self, seed: int) -> Iterator[object]:
        """All rows, shard after shard in an order of its own."""
        n = self._dataset.num_shards
        for place in range(n):
            shard = permuted(place, n, seed)
            yield from self._read(self._dataset.shard(n, shard) if n > 1 else self._dataset)

    def _read(self, dataset: Any) -> Iterator[object]:
        # `iter` and not a plain loop, which would give each worker a part of the shards only.
        batches = dataset.iter(batch_size=_READ_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # of many libraries: network, decoding, access
                raise DataError(
                    f"{self._name}: reading the stream failed ({_first_line(error)}); run again to resume"
                ) from error
            if batch is None:
                return
            n_rows = len(next(iter(batch.values())))
            if self._field is None:
                yield from ({k: values[i] for k, values in batch.items()} for i in range(n_rows))
            else:
                yield from batch.get(self._field, [None] * n_rows)

    def place(self, row: int) -> str:
        """Number of the row in the order in which it was read."""
        return f"{self._name} row {row + 1} as streamed"

    def describe(self) -> str:
        """Name for messages."""
        return f"HuggingFace({self._name}, streaming=True)"


def _open(config: HuggingFace.Config) -> Any:
    datasets = require("datasets", extra="data", purpose="reading a Hugging Face data set")
    folder = Path(config.name).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return _open_saved(datasets, folder, config)
        return datasets.load_dataset(
            config.name, config.subset, split=config.split, streaming=config.streaming
        )
    except Exception as error:  # of many libraries: network, login, disk, formats
        raise DataError(
            f"{config.name}: cannot open the data set (split={config.split}, subset={config.subset}): "
            f"{_first_line(error)}; check the name, subset and split, the network and HF_HUB_OFFLINE"
        ) from error


def _open_saved(datasets: Any, folder: Path, config: HuggingFace.Config) -> Any:
    dataset = datasets.load_from_disk(str(folder))
    if isinstance(dataset, datasets.DatasetDict):
        dataset = dataset[config.split]
    return dataset.to_iterable_dataset() if config.streaming else dataset


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
