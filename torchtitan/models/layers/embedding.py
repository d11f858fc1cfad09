"""The token embedding."""

# Shapes: B batch, S sequence, V vocabulary, D dim.

from torch import nn

from torchtitan.models.layers.init import Initializer


class Embedding(nn.Embedding):
    """``(B, S) -> (B, S, D)``.

    Args:
        vocab_size: V.
        dim: D.
        init_std: standard deviation of the weight's truncated normal start.
    """

    def __init__(self, vocab_size: int, dim: int, *, init_std: float) -> None:
        super().__init__(vocab_size, dim)
        self.init_std = init_std

    def reset_parameters(self) -> None:
        """Do nothing: `torchtitan.models.layers.init.init_weights` fills the weights, by name."""

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(std=self.init_std)}
