"""Which experts a token goes to, and with which weights."""

# Shapes: T tokens, D dim, E experts, G groups of experts, K experts of a token.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.init import Initializer
from torchtitan.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router decided.

    Attributes:
        experts: ``(T, K)`` int64, the chosen experts of each token, all different.
        weights: ``(T, K)`` float32, what each expert's output is multiplied with.
        probabilities: ``(T, E)`` float32, scores that sum to 1 for each token: what auxiliary losses act on.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


class Gate(Linear):
    """The router's projection, computed in float32 whatever the type of activations, so that rounding makes no ties."""

    def forward(self, input: Tensor) -> Tensor:
        """``(T, D) -> (T, E)``, float32."""
        return F.linear(input.float(), self.weight.float())


class Router(nn.Module, Configurable):
    """Top-k routing by softmax or sigmoid scores.

    In order: scores of the logits; plus `expert_bias` for the choice alone (arXiv:2408.15664); only experts of the best
    groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); the `top_k` best; their scores *without* bias as weights,
    divided by their sum, times `scale`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Router`."""

        top_k: int
        """Experts of a token."""
        score: Literal["softmax", "sigmoid"] = "softmax"
        """From logits to scores: over all experts together, or each on its own."""
        normalize: bool = True
        """Divide the weights of the chosen experts by their sum."""
        scale: float = 1.0
        """Factor on the weights, after normalisation."""
        n_groups: int = 1
        """Groups of neighbouring experts, of equal size; with more than one, a token's experts come from `top_groups`."""
        top_groups: int = 1
        """Groups that a token may choose from."""
        group_score: Literal["max", "top2_sum"] = "top2_sum"
        """Score of a group: its best expert's (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
        bias_rate: float | None = None
        """Loss-free balancing: after each optimizer step an expert with fewer tokens than the mean gets this much more
        bias, one with more gets less. 0 keeps the bias as it is, None is a router without bias."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.top_k < 1:
                yield Problem("top_k", self.top_k, "is not positive", "set at least 1")
            if self.scale <= 0:
                yield Problem("scale", self.scale, "is not positive", "set 1 for none")
            if self.n_groups < 1:
                yield Problem("n_groups", self.n_groups, "is not positive", "set 1 for none")
            elif not 1 <= self.top_groups <= self.n_groups:
                yield Problem(
                    "top_groups",
                    self.top_groups,
                    f"is not between 1 and n_groups={self.n_groups}",
                    "choose from that range",
                )
            if self.bias_rate is not None and self.bias_rate < 0:
                yield Problem(
                    "bias_rate",
                    self.bias_rate,
                    "is negative",
                    "set one such as 0.001, or None for no bias",
                )

        def check_experts(self, n_experts: int) -> Iterator[Problem]:
            """Yield what is wrong when there are ``n_experts``."""
            if any(True for _ in self.check()):
                return
            if n_experts % self.n_groups:
                divisors = [n for n in range(1, n_experts + 1) if n_experts % n == 0]
                yield Problem(
                    "n_groups",
                    self.n_groups,
                    f"does not divide n_experts={n_experts}",
                    f"choose one of {divisors}",
                )
                return
            group = n_experts // self.n_groups
            if self.top_k > group * self.top_groups:
                yield Problem(
                    "top_k",
                    self.top_k,
                    f"is more than the {group * self.top_groups} experts that a token may choose from "
                    f"(n_experts={n_experts} / n_groups={self.n_groups} * top_groups={self.top_groups})",
                    f"set at most {group * self.top_groups}",
                )
            if self.n_groups > 1 and self.group_score == "top2_sum" and group < 2:
                yield Problem(
                    "group_score",
                    "top2_sum",
                    "needs two experts in a group, which has 1",
                    "set max",
                )

        def build(self, *, dim: int, n_experts: int, init_std: float) -> "Router":
            """Make the router of ``n_experts`` in a model of width ``dim``."""
            return Router(self, dim=dim, n_experts=n_experts, init_std=init_std)

    def __init__(self, config: Config, *, dim: int, n_experts: int, init_std: float) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(dim, n_experts, init_std=init_std)
        self.expert_bias: Tensor | None
        bias = None if config.bias_rate is None else torch.zeros(n_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)

    def forward(self, tokens: Tensor) -> Routing:
        """``(T, D)`` to the routing of T tokens."""
        config = self.config
        logits = self.gate(tokens)  # (T, E)
        if config.score == "softmax":
            scores = probabilities = logits.softmax(dim=-1)  # (T, E)
        else:
            scores = logits.sigmoid()  # (T, E)
            probabilities = scores / scores.sum(dim=-1, keepdim=True)
        experts = self._choose(scores.detach())  # (T, K)
        weights = scores.gather(1, experts)  # (T, K)
        if config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * config.scale, probabilities)

    def _choose(self, scores: Tensor) -> Tensor:
        """The chosen experts: ``(T, E) -> (T, K)``."""
        config = self.config
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if config.n_groups > 1:
            grouped = scores.unflatten(1, (config.n_groups, -1))  # (T, G, E/G)
            best = grouped.topk(1 if config.group_score == "max" else 2, dim=-1).values
            groups = best.sum(dim=-1).topk(config.top_groups, dim=-1).indices  # (T, top_groups)
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, groups, False)
            scores = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)  # (T, E)
        return scores.topk(config.top_k, dim=-1).indices

    @torch.no_grad()
    def balance(self, counts: Tensor, skip: Tensor) -> None:
        """Move the bias of each expert towards an equal load; the biases go on summing to 0.

        Args:
            counts: ``(E,)``, tokens of each expert in the whole step.
            skip: scalar, 1 where the step changed no weight: the bias is then left alone too.
        """
        rate = self.config.bias_rate
        if self.expert_bias is None or not rate:
            return
        direction = (counts.mean() - counts).sign().float()  # (E,)
        change = rate * (direction - direction.mean())
        self.expert_bias.add_(torch.where(skip > 0, torch.zeros_like(change), change))

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"expert_bias": Initializer()}
