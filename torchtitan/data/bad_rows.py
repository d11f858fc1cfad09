"""What is done with rows that hold no usable text: skip and count, or stop; and when there are too many."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from torchtitan.data.source import BadRow
from torchtitan.errors import DataError

MIN_BAD_ROWS = 10
"""The fraction of bad rows is judged from this many on: fewer say nothing about a data set, and each of them has
been shown."""

DOCUMENTS = "documents"
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class BadRowPolicy:
    """The policy for bad rows.

    Attributes:
        action: ``skip`` counts them, ``error`` stops at the first.
        max_fraction: largest accepted share of bad rows, 0..1.
    """

    action: Literal["skip", "error"] = "skip"
    max_fraction: float = 0.01

    def meet(self, row: BadRow, counts: Counter[str]) -> None:
        """Count a bad row, or one that is dropped without fault.

        Raises:
            DataError: if the policy is to stop.
        """
        if not row.fault:
            counts[f"dropped_{row.kind}"] += 1
            return
        if self.action == "error":
            raise DataError(
                f"bad row: {row}; mend the row, or set bad_rows=skip to leave such rows out"
            )
        counts[f"bad_{row.kind}"] += 1

    def judge(self, counts: Counter[str]) -> None:
        """Raise if too many of the rows read so far were bad.

        Raises:
            DataError: with the counts by kind.
        """
        bad, rows = bad_total(counts), counts.total()
        if bad >= MIN_BAD_ROWS and bad > self.max_fraction * rows:
            raise DataError(
                f"{bad} of {rows} rows read are bad ({bad_kinds(counts)}), which is more than "
                f"max_bad_fraction={self.max_fraction:g}; mend the data, or raise max_bad_fraction"
            )


def bad_total(counts: Counter[str]) -> int:
    """Number of bad rows of every kind."""
    return sum(count for kind, count in counts.items() if kind.startswith("bad_"))


def bad_kinds(counts: Counter[str], prefix: str = "bad_") -> str:
    """The bad rows by kind, such as ``broken 3, null 1``; with ``dropped_``, those dropped without fault."""
    kinds = {
        kind.removeprefix(prefix): count
        for kind, count in sorted(counts.items())
        if kind.startswith(prefix)
    }
    return ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "none"
