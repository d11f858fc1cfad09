"""The output head: from hidden states to what an objective asks for, never to all logits in training."""

# Shapes: B batch, S sequence, D dim, V vocabulary.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.init import Initializer
from torchtitan.models.layers.plan import VOCABULARY_OUT, Cut
from torchtitan.models.layers.tape import Place
from torchtitan.ops.linear_cross_entropy import linear_cross_entropy
from torchtitan.ops.vocabulary import VocabularyShard


class Head(nn.Module, Configurable):
    """A projection to the vocabulary whose ``forward`` is the fused loss.

    The loss is computed inside ``forward`` so that FSDP gathers the weight around it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Head`."""

        OPERATIONAL = frozenset({"chunk_tokens"})

        chunk_tokens: int = 1024
        """Tokens whose logits exist at once; a chunk takes 4 bytes x this x vocabulary."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.chunk_tokens < 1:
                yield Problem(
                    "chunk_tokens", self.chunk_tokens, "is not positive", "set one such as 1024"
                )

        def build(self, *, dim: int, vocab_size: int, init_std: float) -> "Head":
            """Make the head of a model of width ``dim``."""
            return Head(self, dim=dim, vocab_size=vocab_size, init_std=init_std)

    def __init__(self, config: Config, *, dim: int, vocab_size: int, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.chunk_tokens = config.chunk_tokens
        self.vocabulary: VocabularyShard | None = None

    def forward(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropy over the labels that count: ``(B, S, D), (B, S) -> ()`` in float32."""
        return linear_cross_entropy(
            hidden_states.flatten(0, 1),
            self.weight,
            labels.flatten(),
            chunk_tokens=self.chunk_tokens,
            vocabulary=self.vocabulary,
        )

    def loss_bytes(self, place: Place) -> tuple[int, int]:
        """Most bytes that the fused loss adds in its forward, and in its backward, with all tokens counted.

        The forward has the gradients so far and a chunk's logits, while those of the chunk before are still there. The
        backward scales both gradients into the type of their tensors.
        """
        n_entries, dim = self.weight.shape
        n_entries, b = -(-n_entries // place.tp), place.itemsize
        weight, states = n_entries * dim, place.tokens * dim * b
        chunk = min(self.chunk_tokens, place.tokens) * n_entries
        logits = (4 if b == 4 else 4 + b) * chunk
        before = logits if place.tokens > self.chunk_tokens else 0
        gradients = 4 * weight + states
        if b == 4:
            return gradients + before + logits, gradients + 4 * weight + states
        # Then the weight's part of a chunk, in the type of the matmul.
        forward = max(before + logits, logits + b * weight)
        return gradients + forward, gradients + (4 + b) * weight + states

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank has a part of the vocabulary, and computes its logits only."""
        return {"": VOCABULARY_OUT}

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(std=self.init_std)}
