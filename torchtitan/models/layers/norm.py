"""Root-mean-square norm."""

# Shapes: D features; "..." any leading dimensions.

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.init import Initializer


class RMSNorm(nn.RMSNorm, Configurable):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `RMSNorm`."""

        eps: float = 1e-5
        """Added to the mean square, so that a zero vector stays finite."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.eps < 0:
                yield Problem("eps", self.eps, "is negative", "set a small number such as 1e-5")

        def build(self, dim: int) -> "RMSNorm":
            """Make the norm of vectors of ``dim`` features."""
            return RMSNorm(dim, eps=self.eps)

    def reset_parameters(self) -> None:
        """Do nothing: `torchtitan.models.layers.init.init_weights` fills the weights, by name."""

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(mean=1.0)}
