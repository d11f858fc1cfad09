"""What the rest of the library may ask of a model, whatever its family."""

# Shapes: B batch, S sequence, D dim.

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.head import Head
from torchtitan.models.layers.tape import Place, Tape, Value
from torchtitan.parallel.degrees import Degrees


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Exact numbers of parameters; a shared one counts once.

    Attributes:
        total: all of them.
        active: those that one token uses: all but the experts that it does not go to.
        matmul: those that each token is multiplied with, the head included (a tied table counts here).
        embedding: those of the token embedding.
    """

    total: int
    active: int
    matmul: int
    embedding: int


class Model(nn.Module, Configurable):
    """A model that says how it can be cut, and lets the library do the cutting.

    ``forward`` takes the `batch_fields` of a batch and returns ``(B, S, D)`` hidden states, after the final norm
    (under sequence parallel this rank's ``(B, S/tp, D)``, which the head takes as they are).
    Built on the meta device; `torchtitan.models.layers.init.init_weights` or a checkpoint fills it.

    A stage of a pipeline is the same class after `keep`: a later one takes the hidden states of the stage before as
    its first argument, and an earlier one returns hidden states that are not normalised yet.
    """

    batch_fields: ClassVar[tuple[str, ...]]
    """Fields of the batch that ``forward`` takes, in order; the trainer hands over these and knows none of them."""

    head: Head
    """A submodule that ``forward`` does not run: the objective asks it for what it needs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of a model family."""

        vocab_size: int
        """Rows of the embedding and of the head; at least the tokenizer's."""

        @property
        @abstractmethod
        def n_blocks(self) -> int:
            """Number of `Model.blocks`."""

        def check_degrees(self, degrees: Degrees, seq_len: int) -> Iterator[Problem]:
            """Yield what keeps this model from being cut over ``degrees``; paths are from this node.

            Args:
                degrees: ranks along each axis.
                seq_len: tokens in a row.
            """
            del degrees, seq_len
            return iter(())

        def check_seq_len(self, seq_len: int) -> Iterator[Problem]:
            """Yield a problem if rows of ``seq_len`` tokens are longer than what the model is made for."""
            del seq_len
            return iter(())

        def check_one_graph(self) -> Iterator[Problem]:
            """Yield a problem for each layer that keeps a block from being compiled as one graph."""
            return iter(())

        @abstractmethod
        def build(self) -> "Model":
            """Make the model on the current default device (meta, as a rule)."""

    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated units in order: FSDP wraps, checkpointing recomputes and pipelines cut between them."""

    @abstractmethod
    def edge_units(self) -> Sequence[nn.Module]:
        """Modules outside the blocks that are large enough to be gathered on their own (embedding, head)."""

    @abstractmethod
    def keep(self, blocks: range, first: bool, last: bool) -> None:
        """Become one stage of a pipeline, in place, on the meta device; what is kept keeps its name.

        Args:
            blocks: the `blocks` to keep, by number.
            first: keep what comes before them (the embedding).
            last: keep what comes after them (final norm and head).
        """

    @abstractmethod
    def stage_shape(self, rows: int, seq_len: int) -> tuple[int, ...]:
        """Shape of the hidden states between two stages, for ``rows`` rows of ``seq_len`` tokens."""

    def shared_parameters(self) -> Mapping[str, str]:
        """Second names of parameters with several users, each with the name that `named_parameters` gives.

        Within a stage they are one parameter. Where a pipeline puts the users into different stages, the second name
        is a copy: `torchtitan.parallel.shared_parameters.SharedParameters` keeps it equal and sums the gradients.
        """
        return {}

    def names_elsewhere(self) -> Iterable[str]:
        """Names of the model's parameters that are not on this rank, but in another stage of the pipeline."""
        return ()

    def record_end(self, tape: Tape, x: Value) -> Value:
        """Record what stands between the last block and the head; for the planner."""
        del tape
        return x

    def shared_bytes(self, place: Place) -> int:
        """Bytes that all blocks share from forward to backward (tables, masks); for the planner."""
        del place
        return 0

    @abstractmethod
    def parameter_counts(self) -> ParameterCounts:
        """Count the parameters of the whole model."""

    @abstractmethod
    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """FLOPs of forward and backward per token, without recomputation, at ``seq_len`` tokens a row."""
