"""How a layer may be cut over tensor-parallel ranks: words in which layers speak, and `torchtitan.parallel.tensor` acts.

The residual stream has one of two forms: whole on each rank, or (sequence parallel) each rank with its part of the
sequence. Inside a layer each rank has the whole sequence and its part of the heads or features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from torchtitan.ops.vocabulary import VocabularyShard


class Sees(Enum):
    """What of its input a rank's module gets; it decides whether a whole parameter's gradient is one."""

    WHOLE = "whole"
    """The same on each rank: so is the gradient of a parameter that each rank has whole."""
    STREAM = "stream"
    """The residual stream: under sequence parallel a part of the tokens, otherwise the same on each rank."""
    PART = "part"
    """Other heads or features on each rank: the gradients of a whole parameter must be added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one module holds, takes and gives on a tensor-parallel rank.

    Attributes:
        shard_dim: of the module's own parameters, along which they are divided; one that lacks it (a bias), and all of them if None, is
            whole on each rank.
        sees: what the module's input is when it runs (after ``gathers_input``).
        gathers_input: the first positional argument is the residual stream and is made whole before the module runs; in the backward, the
            ranks' gradients of it are added up.
        sums_output: the output is this rank's summand: the ranks' outputs are added up into the residual stream. A whole bias is added
            once, after that.
        vocabulary: the parameters' rows are vocabulary entries; the module is told which (`HasVocabulary`).
        elsewhere: another parallelism places the parameters, and the tp ranks are not all alike to it.
    """

    shard_dim: int | None = None
    sees: Sees = Sees.WHOLE
    gathers_input: bool = False
    sums_output: bool = False
    vocabulary: bool = False
    elsewhere: bool = False


COLWISE = Cut(shard_dim=0)
"""A projection from whole features to this rank's features (Megatron's column-parallel, arXiv:1909.08053)."""
ROWWISE = Cut(shard_dim=1, sees=Sees.PART, sums_output=True)
"""A projection from this rank's features to the residual stream (row-parallel)."""
SEQUENCE = Cut(sees=Sees.STREAM)
"""A layer that treats each token of the residual stream alone, a norm say (sequence parallel, arXiv:2205.05198)."""
HEADS = Cut(sees=Sees.PART)
"""A layer that treats each head or feature of this rank alone, a norm of queries say."""
WHOLE_INPUT = Cut(gathers_input=True)
"""A layer whose projections are COLWISE and ROWWISE: they share one gathered input."""
VOCABULARY_IN = Cut(shard_dim=0, sums_output=True, vocabulary=True)
"""A table looked up by token: each rank has its entries and gives zeros for the others."""
VOCABULARY_OUT = Cut(shard_dim=0, gathers_input=True, vocabulary=True)
"""A projection to the vocabulary, of which each rank computes its entries."""

EXPERTS = Cut(elsewhere=True)
"""Routed experts: expert parallelism borrows the tp ranks for them."""


@runtime_checkable
class HasParallelPlan(Protocol):
    """A module that says how it and its submodules are cut."""

    def parallel_plan(self) -> Mapping[str, Cut]:
        """Map the dotted names of submodules (``""`` is the module itself) to their cuts.

        Each module with parameters of its own must be named once: by itself or by a module around it.
        """
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """A module whose parameters' rows are vocabulary entries."""

    vocabulary: VocabularyShard | None
    """The entries that this rank has; None means all."""
