"""Tokenised samples in a file, and what the packing contestants tell of the rows that they make. Needs numpy alone.

Shapes: T tokens of all samples, N samples.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving import cpu_s

IGNORE = -100
FIRST_ID = 16
"""No sample has a token below it; what fills rows up is one."""


@dataclass(slots=True)
class Samples:
    """What all contestants pack.

    Attributes:
        tokens: ``(T,)`` int32.
        learned: ``(T,)`` bool, whether each token is a target.
        starts: ``(N + 1,)`` of the samples.
    """

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            yield self.tokens[start:end], self.learned[start:end]

    def save(self, path: Path) -> None:
        """Write them to a file."""
        np.savez(path, **asdict(self))

    @staticmethod
    def read() -> "tuple[Samples, dict[str, Any]]":
        """The samples of the file that the benchmark names in a worker's setup, and the setup."""
        setup = json.loads(sys.argv[1])
        file = np.load(setup["samples"])
        return Samples(file["tokens"], file["learned"], file["starts"]), setup


@dataclass(slots=True)
class Rows:
    """Counts of finished rows, to be compared over contestants.

    Attributes:
        filled: tokens that are in samples.
        learned: labels that count.
        token_sum: of the ids of the tokens that are in samples.
        label_sum: of the labels that count.
    """

    filled: int = 0
    learned: int = 0
    token_sum: int = 0
    label_sum: int = 0

    def add(self, tokens: Any, labels: Any) -> None:
        """Count tokens and labels: arrays, or tensors, of the same shape."""
        tokens, labels = np.asarray(tokens), np.asarray(labels)
        filled, counted = tokens >= FIRST_ID, labels != IGNORE
        self.filled += int(filled.sum())
        self.learned += int(counted.sum())
        self.token_sum += int(tokens[filled].sum(dtype=np.int64))
        self.label_sum += int(labels[counted].sum(dtype=np.int64))


@contextmanager
def timed(into: dict[str, Any], name: str) -> Iterator[None]:
    """Seconds on the clock and of CPU, as ``<name>_s`` and ``<name>_cpu_s``."""
    start, cpu = time.perf_counter(), cpu_s()
    yield
    into[f"{name}_s"] = time.perf_counter() - start
    into[f"{name}_cpu_s"] = cpu_s() - cpu


def run(
    pack: Callable[[], Sized], batches_of: Callable[[Any], Iterator[dict[str, Any]]]
) -> dict[str, Any]:
    """Pack, and make all batches; count what is in them outside of the time.

    Args:
        pack: makes the packs, each of which is a row.
        batches_of: the batches that training would get, from the packs.
    """
    found: dict[str, Any] = {}
    with timed(found, "pack"):
        packs = pack()
    with timed(found, "rows"):
        batches = list(batches_of(packs))
    rows = Rows()
    for batch in batches:
        rows.add(batch.get("tokens", batch.get("input_ids")), batch["labels"])
    return {**found, "n_rows": len(packs), **asdict(rows)}
