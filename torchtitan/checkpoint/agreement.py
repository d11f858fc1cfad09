"""Steps that all ranks take together: what fails on one rank fails on all of them, in words, without a hang."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from torchtitan.errors import CheckpointError, DistributedError

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the others: a large shard on a slow disk takes minutes longer than a small one."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """What a step gave on one rank: a value, or the sentence that says why there is none."""

    value: T | None
    failure: str | None


class Agreement:
    """The ranks of the run, on a gloo group of their own.

    The group is separate from the training's, so that a background save never meets the collectives of a
    training step. One process needs no group, and no initialised ``torch.distributed``.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """Create the group; all ranks must call this at the same point.

        Args:
            timeout_s: seconds that a rank waits for the others: the longest that one may be ahead of another.
        """
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            self.group = cast(
                "dist.ProcessGroup",
                dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)),
            )

    def each(self, what: str, step: Callable[[], T]) -> list[T]:
        """Run ``step`` on every rank and return the results of all ranks, by rank.

        Args:
            what: the step in words ("writing step 10"), the start of the error text.
            step: what this rank does; its result travels to all ranks, so it is small.

        Raises:
            CheckpointError: on all ranks, if ``step`` failed on any of them; names ranks and causes.
            DistributedError: if another rank is gone.
        """
        outcome, error = _attempt(step)
        outcomes: list[Any] = [outcome]
        if self.group is not None:
            outcomes = [None] * self.world_size
            _with_ranks(what, lambda: dist.all_gather_object(outcomes, outcome, group=self.group))
        failures = {rank: o.failure for rank, o in enumerate(outcomes) if o.failure is not None}
        if failures:
            raise CheckpointError(f"{what}: {self.describe(failures)}") from error
        return [o.value for o in outcomes]

    def first(self, what: str, step: Callable[[], T]) -> T:
        """Run ``step`` on rank 0 alone and return its result on all ranks.

        Raises:
            CheckpointError: on all ranks, if ``step`` failed.
            DistributedError: if another rank is gone.
        """
        outcome, error = _attempt(step) if self.rank == 0 else (None, None)
        box: list[Any] = [outcome]
        if self.group is not None:
            _with_ranks(what, lambda: dist.broadcast_object_list(box, src=0, group=self.group))
        if box[0].failure is not None:
            raise CheckpointError(f"{what}: {box[0].failure}") from error
        return box[0].value

    def describe(self, failures: dict[int, str]) -> str:
        """``failures`` (rank to cause) in one sentence, each cause once."""
        if self.world_size == 1:
            return failures[0]
        ranks_of: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            ranks_of.setdefault(failure, []).append(rank)
        return "; ".join(
            f"rank {', '.join(map(str, ranks))}: {failure}" for failure, ranks in ranks_of.items()
        )


def cause(error: BaseException) -> str:
    """``error`` in words: its own text where that is a sentence, else with its type."""
    return str(error) if isinstance(error, CheckpointError | OSError) else repr(error)


def _attempt(step: Callable[[], T]) -> tuple[_Outcome[T], Exception | None]:
    try:
        return _Outcome(step(), None), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it or they hang
        return _Outcome(None, cause(error)), error


def _with_ranks(what: str, collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise DistributedError(
            f"{what}: another rank is gone or did not answer: {error}"
        ) from error
