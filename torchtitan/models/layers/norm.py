"""Root-mean-square norm."""

# Shapes: D features; "..." any leading dimensions.

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.init import Initializer
from torchtitan.models.layers.tape import Tape, Value


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

    def record(self, tape: Tape, x: Value) -> Value:
        """See `Recorded`: fused it keeps its input and a number a token; on a CPU, float32 copies of it."""
        float32 = x.tokens * x.features * 4
        copies = 0 if x.itemsize == 4 else float32
        return tape.elementwise(
            x,
            saves=tape.place.gpu or not copies,
            keeps=4 * x.tokens if tape.place.gpu else float32 + copies + 4 * x.tokens,
            scratch=0 if tape.place.gpu else float32,
            backward_scratch=0 if tape.place.gpu else 3 * float32,
            weights=x.features * x.itemsize,
        )
