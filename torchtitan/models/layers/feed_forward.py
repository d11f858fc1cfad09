"""The feed-forward layer of a block: what all kinds have in common, and the dense one."""

# Shapes: B batch, S sequence, D dim, F feed-forward dim. "/tp" = local to a TP rank.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.linear import Linear
from torchtitan.models.layers.plan import COLWISE, ROWWISE, WHOLE_INPUT, Cut
from torchtitan.models.layers.tape import Tape, Value


class FeedForward(nn.Module, Configurable):
    """Base of the feed-forward layers, dense and with experts: ``(B, S, D) -> (B, S, D)``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings that every kind has."""

        ONE_GRAPH: ClassVar[bool] = True
        """Whether torch.compile makes one graph of it."""

        def build(self, *, dim: int, init_std: float, residual_std: float) -> "FeedForward":
            """Make the layer; ``residual_std`` is for the projection that writes to the residual stream."""
            raise TypeError(
                f"{type(self).__qualname__} is a base; choose SwiGLU.Config or MoE.Config"
            )

        def check_dim(self, dim: int) -> Iterator[Problem]:
            """Yield what is wrong with this layer in a model of width ``dim``."""
            del dim
            return iter(())

        def divided_sizes(self) -> dict[str, int]:
            """Sizes by field that tensor parallelism divides."""
            return {}

        def check_stream(self, tp: int, sequence_shards: int) -> Iterator[Problem]:
            """Yield a problem if this layer cannot work on the residual stream of a rank.

            Args:
                tp: ranks that share it.
                sequence_shards: parts into which they divide its tokens.
            """
            del tp, sequence_shards
            return iter(())

        def check_ep(self, ep: int, lendable: int) -> Iterator[Problem]:
            """Yield a problem if ``ep`` ranks cannot share this layer's experts, out of the ``lendable`` ranks."""
            del lendable
            if ep > 1:
                yield Problem(
                    "",
                    type(self).__qualname__,
                    f"has no experts for parallelism.ep={ep} ranks to share",
                    "set parallelism.ep to 1",
                )


class SwiGLU(FeedForward):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202)."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
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
            """See `FeedForward.Config.divided_sizes`."""
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

    def record(self, tape: Tape, x: Value) -> Value:
        """See `Recorded`."""
        tp = tape.place.tp
        width, numel = self.gate_proj.out_features // tp, self.gate_proj.weight.numel() // tp
        x = tape.gather_stream(x)
        gate = tape.elementwise(tape.linear(x, width, weight_numel=numel))  # silu
        gated = tape.multiply(gate, tape.linear(x, width, weight_numel=numel))
        out = tape.linear(gated, self.down_proj.out_features, weight_numel=numel)
        return tape.sum_stream(out)

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank has a part of the hidden layer."""
        return {
            "": WHOLE_INPUT,
            "gate_proj": COLWISE,
            "up_proj": COLWISE,
            "down_proj": ROWWISE,
        }
