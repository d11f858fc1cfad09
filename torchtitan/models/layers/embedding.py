"""The token embedding."""

# Shapes: B batch, S sequence, V vocabulary, D dim.

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.layers.init import Initializer
from torchtitan.models.layers.plan import VOCABULARY_IN, Cut
from torchtitan.ops.vocabulary import VocabularyShard


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
        self.vocabulary: VocabularyShard | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``(B, S) -> (B, S, D)``; of a divided vocabulary the summand: zeros where the entry is on another rank."""
        if self.vocabulary is None:
            return super().forward(input)
        rows, here = self.vocabulary.localize(input)
        return F.embedding(rows, self.weight).masked_fill(~here[..., None], 0)

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank has a part of the vocabulary."""
        return {"": VOCABULARY_IN}

    def reset_parameters(self) -> None:
        """Do nothing: `torchtitan.models.layers.init.init_weights` fills the weights, by name."""

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(std=self.init_std)}
