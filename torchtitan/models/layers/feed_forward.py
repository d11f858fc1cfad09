"""The gated feed-forward layer."""

# Shapes: B batch, S sequence, D dim, F feed-forward dim. "/tp" = local to a TP rank.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.linear import Linear
from torchtitan.models.layers.plan import COLWISE, ROWWISE, WHOLE_INPUT, Cut


class SwiGLU(nn.Module, Configurable):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `SwiGLU`."""

        ffn_dim: int
        """Width of the hidden layer."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.ffn_dim < 1:
                yield Problem(
                    "ffn_dim", self.ffn_dim, "is not positive", "set a width such as 8*dim/3"
                )

        def divided_sizes(self) -> dict[str, int]:
            """Sizes by field that tensor parallelism divides."""
            return {"ffn_dim": self.ffn_dim}

        def build(self, *, dim: int, init_std: float, residual_std: float) -> "SwiGLU":
            """Make the layer; ``residual_std`` is for the projection that writes to the residual stream."""
            return SwiGLU(self, dim=dim, init_std=init_std, residual_std=residual_std)

    def __init__(self, config: Config, *, dim: int, init_std: float, residual_std: float) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, config.ffn_dim, init_std=init_std)
        self.up_proj = Linear(dim, config.ffn_dim, init_std=init_std)
        self.down_proj = Linear(config.ffn_dim, dim, init_std=residual_std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(B, S, D) -> (B, S, D)``."""
        gated = F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)  # (B, S, F/tp)
        return self.down_proj(gated)  # (B, S, D)

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank has a part of the hidden layer."""
        return {
            "": WHOLE_INPUT,
            "gate_proj": COLWISE,
            "up_proj": COLWISE,
            "down_proj": ROWWISE,
        }
