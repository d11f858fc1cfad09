"""What the fused operations of an output head share: logits a chunk of tokens at a time, and the gradients on the way."""

# Shapes: T tokens, D dim, V vocabulary, C tokens of a chunk. "/tp" = local to a TP rank.

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.batch import IGNORE_INDEX

Accumulation = Literal["float32", "weight_dtype"]
"""In which type the gradient of a head's weight is added up over the chunks."""

ROWS_AT_ONCE = 8192
"""Of the weight's gradient, where it is in another type than the matmul's result."""


class ChunkTerms(Protocol):
    """The losses of a chunk of tokens, from their logits."""

    def __call__(self, raw: Tensor, rows: slice, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Compute the chunk's loss sum and, if asked for, its gradient with respect to ``raw``.

        Args:
            raw: ``(C, V/tp)`` float32 products of states and weight; may be overwritten.
            rows: which of the tokens these are.
            gradient: whether the gradient is needed.

        Returns:
            Scalar, and ``(C, V/tp)`` or None.
        """
        ...


def sum_over_tokens(
    hidden_states: Tensor,
    weight: Tensor,
    terms: ChunkTerms,
    *,
    chunk_tokens: int,
    accumulation: Accumulation,
) -> Tensor:
    """Sum ``terms`` over chunks of ``hidden_states @ weight.T``; both gradients are computed in the forward.

    The backward multiplies them by the gradient of the sum. It changes nothing of what was saved, so it can run again.
    Without grad mode, and for an input that needs no gradient, nothing is computed for it.

    Args:
        hidden_states: ``(T, D)``.
        weight: ``(V/tp, D)``.
        terms: losses and gradients of a chunk.
        chunk_tokens: C.
        accumulation: type in which the weight's gradient is added up.

    Returns:
        Scalar, float32.
    """
    wanted = torch.is_grad_enabled()
    return _SumOverTokens.apply(hidden_states, weight, terms, chunk_tokens, accumulation, wanted)


def chunks(n_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Cut ``range(n_tokens)`` into slices of ``chunk_tokens``; the last may be shorter."""
    for start in range(0, n_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, n_tokens))


def counted(labels: Tensor) -> Tensor | None:
    """``(T,) -> (T_kept,)`` places of the labels that count; None if all do."""
    kept = (labels != IGNORE_INDEX).nonzero().squeeze(1)  # sync: how many tokens go on
    return None if len(kept) == len(labels) else kept


def check_shapes(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Refuse what cannot be projected.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    if hidden_states.ndim != 2 or labels.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)} and labels {tuple(labels.shape)} "
            "do not fit; pass (T, D) and (T,)"
        )
    if weight.shape[1] != hidden_states.shape[1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} has another width than "
            f"hidden_states {tuple(hidden_states.shape)}; pass (V, D) and (T, D)"
        )


def cap(raw: Tensor, softcap: float | None) -> Tensor:
    """Logits below ``softcap`` in size: ``softcap * tanh(raw / softcap)`` (arXiv:2408.00118 section 2), in place."""
    return raw if softcap is None else raw.div_(softcap).tanh_().mul_(softcap)


def cap_slope(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Derivative of `cap` at what it returned: ``1 - (logits / softcap)^2``; None for 1."""
    return None if softcap is None else (logits / softcap).square_().neg_().add_(1)


class HeadGradients:
    """Gradients of states and weight, from those of the logits of one chunk after another.

    Args:
        hidden_states: ``(T, D)``.
        weight: ``(V/tp, D)``.
        wanted: whether the states', and the weight's, are needed.
        accumulation: type in which the weight's is added up.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        *,
        wanted: tuple[bool, bool],
        accumulation: Accumulation,
    ) -> None:
        dtype = torch.float32 if accumulation == "float32" else weight.dtype
        self._inputs = hidden_states, weight
        self.hidden_states = torch.empty_like(hidden_states) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Take in the ``(C, V/tp)`` gradient of the products of the tokens in ``rows``."""
        hidden_states, weight = self._inputs
        grad_logits = grad_logits.to(weight.dtype)
        if self.hidden_states is not None:
            torch.mm(grad_logits, weight, out=self.hidden_states[rows])
        if self.weight is None:
            return
        hidden = hidden_states[rows]  # (C, D)
        if self.weight.dtype == hidden.dtype:
            self.weight.addmm_(grad_logits.t(), hidden)
            return
        for some in chunks(len(weight), ROWS_AT_ONCE):
            self.weight[some] += grad_logits[:, some].t() @ hidden


def scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``gradient * factor`` in ``dtype``, as a new tensor."""
    if gradient is None:
        return None
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


class _SumOverTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        terms: ChunkTerms,
        chunk_tokens: int,
        accumulation: Accumulation,
        grad_mode: bool,
    ) -> Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        wanted = grad_mode and needs_hidden, grad_mode and needs_weight
        gradients = HeadGradients(hidden_states, weight, wanted=wanted, accumulation=accumulation)
        total = hidden_states.new_zeros((), dtype=torch.float32)
        for rows in chunks(len(hidden_states), chunk_tokens):
            raw = (hidden_states[rows] @ weight.t()).float()  # (C, V/tp)
            loss, grad_logits = terms(raw, rows, gradient=any(wanted))
            total += loss
            if grad_logits is not None:
                gradients.add(rows, grad_logits)
            del raw, grad_logits  # before the next chunk's
        ctx.save_for_backward(gradients.hidden_states, gradients.weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grads = (scaled(saved, grad_outputs[0], ctx.dtype) for saved in ctx.saved_tensors)
        return *grads, None, None, None, None
