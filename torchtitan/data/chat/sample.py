"""What a row becomes: tokens, and which of them are learned.

Shapes: n tokens of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.batch import IGNORE_INDEX
from torchtitan.data.source import BadRow

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class DroppedRow(BadRow):
    """A sound row from which this run cannot learn; ``kind`` is counted, and it is no fault of the data."""

    fault = False


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one conversation; they stay together in a row.

    Attributes:
        tokens: ``(n,)`` int32.
        learned: ``(n,)`` bool, whether each token is a target.
    """

    tokens: Ids
    learned: Flags

    def __len__(self) -> int:
        return len(self.tokens)

    def labels(self) -> Ids:
        """``(n,)``: the token that follows where it is learned, else `IGNORE_INDEX`; shifted here and nowhere else."""
        labels = np.full_like(self.tokens, IGNORE_INDEX)
        labels[:-1] = np.where(self.learned[1:], self.tokens[1:], IGNORE_INDEX)
        return labels


@dataclass(frozen=True, slots=True)
class Pack:
    """Samples that share a row: one, or as many as were packed before.

    Attributes:
        samples: in the order in which they stand in the row.
        n_tokens: of all of them.
    """

    samples: Sequence[Sample]
    n_tokens: int


def pack(samples: Sequence[Sample]) -> Pack:
    """A pack of these samples."""
    return Pack(samples, sum(map(len, samples)))
