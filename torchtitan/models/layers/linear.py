"""The one projection: what adapters wrap and quantization replaces."""

# Shapes: D_in, D_out features; "..." any leading dimensions.

from torch import nn

from torchtitan.models.layers.init import Initializer


class Linear(nn.Linear):
    """``(..., D_in) -> (..., D_out)``, without a bias unless asked for.

    Args:
        in_features: D_in.
        out_features: D_out.
        bias: add a learned bias, which starts at 0.
        init_std: standard deviation of the weight's truncated normal start.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, init_std: float
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.init_std = init_std

    def reset_parameters(self) -> None:
        """Do nothing: `torchtitan.models.layers.init.init_weights` fills the weights, by name."""

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(std=self.init_std), "bias": Initializer()}
