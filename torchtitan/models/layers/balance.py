"""Auxiliary losses that ask a router for an equal load, and the sums of a step that a layer keeps for itself."""

# Shapes: B batch rows, S tokens of a row on this rank, T = B * S, E experts, K experts of a token.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.dispatch import Dispatcher


class AuxLoss(Configurable):
    """Load balancing by a loss: ``coefficient * sum_i f_i P_i`` per token.

    ``P_i`` is expert i's probability, averaged over the tokens of the `scope`; ``f_i`` the part of the scope's tokens
    that chose it, times E/K, so that an equal load costs `coefficient`. Sequence-wise it is equations 17 to 20 of DeepSeek-V3
    (arXiv:2412.19437), batch-wise the loss of Switch (arXiv:2101.03961) for K experts.

    It is a *sum over tokens* divided by the same global count as the main loss: each token adds
    ``coefficient * sum_i f_i p_i``. As ``f`` has no gradient, that of ``p_i`` is ``coefficient * f_i`` over the count,
    known in the forward: it is handed to the backward there, and no rank has to see another's probabilities.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `AuxLoss`."""

        coefficient: float
        """Weight beside the main loss, per token and layer."""
        scope: Literal["sequence", "rank", "micro_batch"] = "sequence"
        """Tokens among which the load is to be equal: those of each row of the batch (the same whatever the mesh and the
        micro-batches), those of a micro-batch on one rank (no communication, but it depends on how the step is cut),
        or those of a micro-batch on all ranks (an all-reduce of E numbers a layer)."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.coefficient <= 0:
                yield Problem(
                    "coefficient",
                    self.coefficient,
                    "is not positive",
                    "set one such as 0.001, or aux_loss to None",
                )

        def build(self) -> "AuxLoss":
            """Make the loss."""
            return AuxLoss(self)

    def __init__(self, config: Config) -> None:
        self.config = config

    @torch.no_grad()
    def costs(self, experts: Tensor, n_experts: int, dispatcher: Dispatcher) -> Tensor:
        """What a unit of each probability costs, ``coefficient * f``, in each row.

        Args:
            experts: ``(B, S, K)`` int64.
            n_experts: E.
            dispatcher: adds counts up over the ranks of the scope.

        Returns:
            ``(B or 1, E)``, float32.
        """
        flat = experts.flatten(1)  # (B, S*K)
        ones = torch.ones_like(flat, dtype=torch.float32)
        counts = ones.new_zeros(len(flat), n_experts).scatter_add_(1, flat, ones)  # (B, E)
        if self.config.scope == "sequence":
            counts = dispatcher.sum_over_row(counts)
        else:
            counts = counts.sum(dim=0, keepdim=True)  # (1, E)
            if self.config.scope == "micro_batch":
                counts = dispatcher.sum_over_batch(counts)
        return self.config.coefficient * n_experts * counts / counts.sum(dim=1, keepdim=True)


class Ledger:
    """A vector of sums over the micro-batches of a step, entered in the backward.

    So each micro-batch counts once: a forward that is recomputed for the backward enters nothing, and one without a
    backward (validation) neither.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        """float64, or None before anything was entered."""

    def clear(self) -> None:
        """Forget the last step."""
        self.sums = None

    def enter(self, sums: Tensor) -> None:
        """Add the sums of a micro-batch."""
        self.sums = sums.clone() if self.sums is None else self.sums.add_(sums)


def contribute(
    output: Tensor,
    ledger: Ledger,
    sums: Tensor,
    probabilities: Tensor | None = None,
    gradient: Tensor | None = None,
) -> Tensor:
    """Return ``output`` unchanged; in its backward enter ``sums`` and add ``gradient`` to that of ``probabilities``.

    Args:
        output: of the layer.
        ledger: of the layer.
        sums: float64 vector, what this micro-batch adds.
        probabilities: that an auxiliary loss acts on.
        gradient: the loss's, in the shape of ``probabilities``.
    """
    return _Contribute.apply(output, probabilities, gradient, sums, ledger)


class _Contribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        probabilities: Tensor | None,
        gradient: Tensor | None,
        sums: Tensor,
        ledger: Ledger,
    ) -> Tensor:
        del probabilities
        ctx.save_for_backward(gradient, sums)
        ctx.ledger = ledger
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        gradient, sums = ctx.saved_tensors
        ctx.ledger.enter(sums)
        return grad_outputs[0], gradient, None, None, None
