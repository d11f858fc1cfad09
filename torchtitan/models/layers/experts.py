"""The experts of a layer, stacked into one weight per projection."""

# Shapes: N rows, sorted by expert; E experts, E/ep of them on a rank; D dim, F width of an expert's hidden layer.

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.models.layers.init import Initializer
from torchtitan.ops.grouped_matmul import grouped_matmul, loop_matmul

Matmul = Literal["grouped", "loop"]


class StackedLinear(nn.Module):
    """One projection of every expert: ``(N, D_in) -> (N, D_out)``.

    Args:
        n_experts: E.
        in_features: D_in.
        out_features: D_out.
        init_std: standard deviation of the weight's truncated normal start.
        matmul: ``grouped`` (one kernel) or ``loop`` (the reference).
    """

    def __init__(
        self,
        n_experts: int,
        in_features: int,
        out_features: int,
        *,
        init_std: float,
        matmul: Matmul,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.matmul = matmul
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """``(N, D_in), (E/ep,) -> (N, D_out)``; ``counts`` are the rows of each expert that is here."""
        weight = self.weight
        if isinstance(weight, torch_api.DTensor):
            weight = weight.to_local()  # (E/ep, D_out, D_in)
        return (grouped_matmul if self.matmul == "grouped" else loop_matmul)(rows, weight, counts)

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(std=self.init_std)}


class Experts(nn.Module):
    """Every expert's ``down(silu(gate(x)) * up(x))``, each on its own rows.

    It computes whatever experts its weights hold: all of them, or this rank's part. A dispatcher brings the rows.

    Args:
        n_experts: E.
        dim: D.
        ffn_dim: F.
        init_std: of the projections into the hidden layer.
        residual_std: of the projections into the residual stream.
        matmul: see `StackedLinear`.
    """

    def __init__(
        self,
        n_experts: int,
        dim: int,
        ffn_dim: int,
        *,
        init_std: float,
        residual_std: float,
        matmul: Matmul,
    ) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.gate_proj = StackedLinear(n_experts, dim, ffn_dim, init_std=init_std, matmul=matmul)
        self.up_proj = StackedLinear(n_experts, dim, ffn_dim, init_std=init_std, matmul=matmul)
        self.down_proj = StackedLinear(
            n_experts, ffn_dim, dim, init_std=residual_std, matmul=matmul
        )

    def stacks(self) -> tuple[StackedLinear, ...]:
        """The modules with weights, each cut on its first dimension where ranks share the experts."""
        return self.gate_proj, self.up_proj, self.down_proj

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """``(N, D), (E/ep,) -> (N, D)``."""
        gated = F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)  # (N, F)
        return self.down_proj(gated, counts)  # (N, D)
