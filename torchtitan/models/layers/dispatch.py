"""How tokens reach the experts that were chosen for them."""

# Shapes: T tokens, K experts of a token, N = T * K slots, D dim, E experts.

from typing import Any

import torch
from torch import Tensor

from torchtitan.models.layers.experts import Experts


class Dispatcher:
    """Every expert is here, and nobody else has tokens.

    Another one is put in its place where ranks share the experts or the tokens of a layer.
    """

    def run(self, experts: Experts, rows: Tensor, counts: Tensor) -> tuple[Tensor, int]:
        """Let each expert compute its rows.

        Args:
            experts: those that are here.
            rows: ``(N, D)``, sorted by expert.
            counts: ``(E,)`` int64, rows of each of all experts.

        Returns:
            The results ``(N, D)``, in the order of ``rows``, and the number of rows that the experts here computed.
        """
        return experts(rows, counts), rows.shape[0]

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Add ``counts`` up over the ranks that hold other tokens of the same sequences."""
        return counts

    def sum_over_batch(self, counts: Tensor) -> Tensor:
        """Add ``counts`` up over all ranks that hold other tokens of the same micro-batch."""
        return counts


class Slots:
    """The (token, expert) pairs of a routing, sorted by expert; token order is kept within an expert.

    Args:
        experts: ``(T, K)`` int64.
        n_experts: E.
    """

    def __init__(self, experts: Tensor, n_experts: int) -> None:
        self.top_k = experts.shape[1]
        flat = experts.flatten()  # (N,)
        self.order = flat.argsort(stable=True)
        """``(N,)``: which pair (token * K + choice) stands at each place."""
        self.inverse = torch.empty_like(self.order)
        """``(N,)``: at which place each pair stands."""
        self.inverse[self.order] = torch.arange(len(flat), device=flat.device)
        self.counts = flat.new_zeros(n_experts).scatter_add_(0, flat, torch.ones_like(flat))
        """``(E,)`` int64: pairs of each expert."""

    def scatter(self, tokens: Tensor) -> Tensor:
        """Copy each token to its K places: ``(T, D) -> (N, D)``."""
        return _ToSlots.apply(tokens, self.order, self.inverse, self.top_k)

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each token's K rows: ``(N, D), (T, K) -> (T, D)``, accumulated in float32."""
        rows = permute(rows, self.inverse, self.order).unflatten(0, (-1, self.top_k))  # (T, K, D)
        return torch.bmm(weights.to(rows.dtype)[:, None], rows).squeeze(1)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``rows[order]``, whose backward is ``grad[inverse]``: no sums, so nothing depends on the order of threads."""
    return _Permute.apply(rows, order, inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad_outputs[0].index_select(0, inverse), None, None


class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return tokens.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grad_outputs[0].index_select(0, inverse).unflatten(0, (-1, ctx.top_k))  # (T, K, D)
        return grad.sum(dim=1), None, None, None
