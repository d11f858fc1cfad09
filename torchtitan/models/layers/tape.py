"""What a layer's forward computes and keeps, written down as sizes: the planner's closed form of activation memory.

A layer's ``record`` is its ``forward`` in bytes: the same operations on `Value`, which have a size and no data. `Tape.cost`
walks them forwards and backwards as autograd does and says what is kept and how much there is at most.
"""

# Shapes: B batch, S sequence, T = B * S / cp tokens of a rank, D features.

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from torchtitan.errors import ConfigError

Kind = Literal["matmul", "attention", "collective", "sum", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer runs: what the sizes of its activations follow from.

    Attributes:
        rows: B, of a micro-batch.
        seq_len: S, over all context ranks.
        itemsize: bytes of an activation.
        gpu: whether kernels are those of a GPU, where norms are fused.
        packed: whether rows hold several documents, which attention keeps apart.
        tp: ranks that share a matmul.
        cp: ranks that share a row.
        ep: ranks that share the experts.
        sequence_shards: parts into which the tp ranks divide the residual stream.
    """

    rows: int
    seq_len: int
    itemsize: int
    gpu: bool
    packed: bool = True
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_shards: int = 1

    @property
    def tokens(self) -> int:
        """T, tokens of a rank inside a layer."""
        return self.rows * self.seq_len // self.cp

    @property
    def stream_tokens(self) -> int:
        """Tokens of a rank in the residual stream."""
        return self.tokens // self.sequence_shards


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of which only the size is known.

    Attributes:
        tokens: rows of features.
        features: of each.
        itemsize: bytes of one.
    """

    tokens: int
    features: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.tokens * self.features * self.itemsize


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: of its forward and of its backward.

    Attributes:
        kind: what selective checkpointing calls it; ``sum`` hands its gradient on without a copy.
        inputs: that get a gradient.
        out: the result.
        saves: values that the backward needs.
        keeps: bytes of its own that the backward needs.
        scratch: bytes that its forward needs besides.
        backward_scratch: bytes that its backward needs besides the gradients of its inputs.
        weights: bytes of the gradients of its parameters.
    """

    kind: Kind
    inputs: tuple[Value, ...]
    out: Value
    saves: tuple[Value, ...] = ()
    keeps: int = 0
    scratch: int = 0
    backward_scratch: int = 0
    weights: int = 0

    @property
    def flops(self) -> float:
        """Of a matmul's forward: ``2 * T * D_in * D_out``, or of a weighted sum of rows."""
        first = self.inputs[0]
        return (
            2.0
            * first.tokens
            * first.features
            * (self.out.features if len(self.inputs) == 1 else 1)
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Activation bytes of a block.

    Attributes:
        kept: from its forward to its backward.
        forward: most at once in its forward, with what is kept by then; its input not counted.
        backward: most at once in its backward, with what is left of what was kept or computed again, and with the
            gradients of its parameters so far.
        weights: gradients of its parameters, when it is done.
        stream: its output, and the gradient of it.
    """

    kept: int
    forward: int
    backward: int
    weights: int
    stream: int


@dataclass(slots=True)
class Tape:
    """Operations in the order of the forward.

    Attributes:
        place: where they run.
        ops: what was recorded.
    """

    place: Place
    ops: list[Op] = field(default_factory=list)

    def stream(self, dim: int) -> Value:
        """A residual stream ``(T/sequence_shards, D)``."""
        return Value(self.place.stream_tokens, dim, self.place.itemsize)

    def linear(self, x: Value, out_features: int, *, weight_numel: int) -> Value:
        """``(T, D_in) -> (T, D_out)``; keeps its input."""
        out = Value(x.tokens, out_features, x.itemsize)
        self.ops.append(
            Op("matmul", (x,), out, saves=(x,), weights=weight_numel * self.place.itemsize)
        )
        return out

    def elementwise(
        self,
        x: Value,
        *,
        saves: bool = True,
        keeps: int = 0,
        scratch: int = 0,
        backward_scratch: int = 0,
        weights: int = 0,
        tokens: int | None = None,
    ) -> Value:
        """An operation whose result is like ``x``, with other ``tokens`` if they are given."""
        out = Value(x.tokens if tokens is None else tokens, x.features, x.itemsize)
        saved = (x,) if saves else ()
        self.ops.append(
            Op("other", (x,), out, saved, keeps, scratch, backward_scratch, weights=weights)
        )
        return out

    def multiply(self, x: Value, y: Value) -> Value:
        """``x * y``; keeps both."""
        out = Value(x.tokens, x.features, x.itemsize)
        self.ops.append(Op("other", (x, y), out, saves=(x, y)))
        return out

    def add(self, x: Value, y: Value) -> Value:
        """``x + y``; keeps nothing."""
        out = Value(x.tokens, x.features, x.itemsize)
        self.ops.append(Op("sum", (x, y), out))
        return out

    def gather_stream(self, x: Value) -> Value:
        """Under sequence parallel, the whole sequence from each rank's part; ``x`` itself without."""
        return self._collective(x, self.place.tokens) if self.place.sequence_shards > 1 else x

    def sum_stream(self, x: Value) -> Value:
        """The tp ranks' summands added up into the residual stream; ``x`` itself with one rank."""
        return self._collective(x, self.place.stream_tokens) if self.place.tp > 1 else x

    def exchange(self, x: Value) -> Value:
        """Rows sent to other ranks and as many received."""
        return self._collective(x, x.tokens)

    def _collective(self, x: Value, tokens: int) -> Value:
        out = Value(tokens, x.features, x.itemsize)
        self.ops.append(Op("collective", (x,), out))
        return out

    def cost(
        self,
        x: Value,
        out: Value,
        recompute: str = "none",
        every_n_matmuls: int = 2,
        budget: float = 1.0,
        *,
        frees_gradients: bool = False,
    ) -> Cost:
        """What a block costs that makes ``out`` of ``x`` by the recorded operations.

        Args:
            x: its input.
            out: its output.
            recompute: a mode of `ActivationCheckpointing`.
            every_n_matmuls: for ``selective``.
            budget: for ``budget``, where the compiler keeps this part; taken as a line between ``full`` and ``none``.
            frees_gradients: parameters' gradients are used up as they come.
        """
        saved = {value for op in self.ops for value in op.saves}
        kept = sum(value.nbytes for value in saved) + sum(op.keeps for op in self.ops)
        backward = self._backward(out, saved, kept, frees_gradients)
        if recompute == "full":
            kept = x.nbytes
        elif recompute == "selective":
            kept = x.nbytes + self._selected(every_n_matmuls)
        elif recompute == "budget":
            kept = x.nbytes + int(budget * (kept - x.nbytes))
        return Cost(
            kept=kept,
            forward=self._forward(saved if recompute == "none" else set(), out),
            backward=backward + (x.nbytes if x not in saved and recompute != "none" else 0),
            weights=sum(op.weights for op in self.ops),
            stream=out.nbytes,
        )

    def recomputed_flops(
        self, recompute: str, every_n_matmuls: int, attention_flops: float
    ) -> float:
        """Of the operations that are computed again; ``attention_flops`` are those of one forward's attention.

        A recomputation ends with the last input that the backward asks for, so the last matmul is not among them.
        """
        if recompute == "none":
            return 0.0
        matmuls = [op for op in self.ops if op.kind == "matmul"]
        kept = matmuls[::every_n_matmuls] if recompute == "selective" and every_n_matmuls else []
        again = [op for op in matmuls[:-1] if all(op is not other for other in kept)]
        return sum(op.flops for op in again) + attention_flops * (recompute != "selective")

    def _selected(self, every_n_matmuls: int) -> int:
        """Bytes that selective checkpointing keeps besides the block's input."""
        matmuls = [op for op in self.ops if op.kind == "matmul"]
        chosen = matmuls[::every_n_matmuls] if every_n_matmuls else []
        others = [op for op in self.ops if op.kind in ("attention", "collective")]
        return sum(op.out.nbytes for op in chosen) + sum(o.out.nbytes + o.keeps for o in others)

    def _forward(self, saved: set[Value], out: Value) -> int:
        """Most bytes at once in the forward, of which ``saved`` stay."""
        reads = Counter(value for op in self.ops for value in op.inputs)
        made: set[Value] = set()
        live = peak = 0
        for op in self.ops:
            live += op.out.nbytes + (op.keeps if saved else 0)
            made.add(op.out)
            peak = max(peak, live + op.scratch)
            for value in op.inputs:
                reads[value] -= 1
                if value in made and not reads[value] and value not in saved and value is not out:
                    live -= value.nbytes
        return peak

    def _backward(self, out: Value, saved: set[Value], kept: int, frees_gradients: bool) -> int:
        """Most bytes at once in the backward; it starts with ``kept`` and the gradient of ``out``."""
        users = Counter(value for op in self.ops for value in op.saves)
        gradients: dict[Value, Value] = {out: out}  # value -> whose buffer its gradient is in
        live = kept + out.nbytes
        peak = live
        for op in reversed(self.ops):
            buffer = gradients.pop(op.out)
            if op.kind == "sum":
                live -= buffer.nbytes
                live += _hand_on(gradients, op.inputs, buffer)
                peak = max(peak, live)
                continue
            live += op.weights
            added = sum(value.nbytes for value in op.inputs)
            sums = sum(value.nbytes for value in op.inputs if value in gradients)
            peak = max(peak, live + added + sums + op.backward_scratch)
            live += added - sums - op.keeps - frees_gradients * op.weights
            for value in op.inputs:
                gradients[value] = value
            if buffer not in gradients.values():
                live -= buffer.nbytes
            for value in op.saves:
                users[value] -= 1
                if not users[value]:
                    live -= value.nbytes
        return peak


def _hand_on(gradients: dict[Value, Value], inputs: Sequence[Value], buffer: Value) -> int:
    """Give both summands the gradient of their sum, in one buffer; its bytes."""
    for value in inputs:
        gradients[value] = buffer
    return buffer.nbytes


@runtime_checkable
class Recorded(Protocol):
    """A layer that writes down what its forward does to the residual stream."""

    def record(self, tape: Tape, x: Value) -> Value:
        """Record the operations of ``forward`` on ``x``; return the result."""
        ...


def record(layer: nn.Module, tape: Tape, x: Value) -> Value:
    """Record what ``layer`` does to ``x``; return the result.

    Raises:
        ConfigError: if the layer does not say what it keeps.
    """
    if not isinstance(layer, Recorded):
        raise ConfigError(
            f"model: its layer {type(layer).__qualname__} does not say what it keeps, so its memory has no closed form; "
            "give it a record(tape, x), see torchtitan/models/layers/tape.py"
        )
    return layer.record(tape, x)
