"""What ranks send each other in a step, as rows that each parallelism states of itself and a test measures."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torchtitan.models.model import Model
from torchtitan.parallel.mesh import Mesh

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Step:
    """The shape of an optimizer step on one rank.

    Attributes:
        micro_batches: forward and backward passes.
        micro_batch_rows: rows of each.
        seq_len: tokens of a row, over all context ranks.
        compute_itemsize: bytes of an activation and of a gathered parameter.
    """

    micro_batches: int
    micro_batch_rows: int
    seq_len: int
    compute_itemsize: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of communication of one rank in one optimizer step.

    Attributes:
        axis: of the mesh, over which it goes.
        ranks: along that axis.
        operation: the collective.
        what: the data, in words.
        calls: how often.
        payload: bytes of the whole tensors, summed over the calls: of what an all-gather yields, of what a reduction
            takes, of what one rank puts into an all-to-all or sends.
    """

    axis: str
    ranks: int
    operation: Operation
    what: str
    calls: int
    payload: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that the rank sends, by the algorithms that send least (a ring)."""
        n = self.ranks
        factor = {"all_reduce": 2 * (n - 1) / n, "send": 1.0}.get(self.operation, (n - 1) / n)
        return factor * self.payload


TrafficOf = Callable[[Model, Mesh, Step], Iterable[Traffic]]
"""What a parallelism says of itself: the rows for a model as this rank has it."""
