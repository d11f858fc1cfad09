"""The output head: from hidden states to what an objective asks for, never to all logits in training."""

# Shapes: B batch, S sequence, D dim, V vocabulary.

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.init import Initializer
from torchtitan.models.layers.plan import VOCABULARY_OUT, Cut
from torchtitan.models.layers.tape import Place
from torchtitan.ops.chunked_head import ROWS_AT_ONCE, Accumulation, cap
from torchtitan.ops.linear_cross_entropy import WeightGradient, linear_cross_entropy
from torchtitan.ops.linear_distillation import Divergence, linear_distillation
from torchtitan.ops.token_log_probs import TokenLogProbs, token_log_probs
from torchtitan.ops.vocabulary import VocabularyShard


class Head(nn.Module, Configurable):
    """A projection to the vocabulary whose ``forward`` is the fused loss.

    Everything that needs the weight is computed inside ``forward``, so that FSDP gathers the weight around it and tensor
    parallelism makes the hidden states whole. What is not the loss has a method of its own, which goes through
    ``forward`` too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Head`."""

        OPERATIONAL = frozenset({"chunk_tokens"})

        chunk_tokens: int = 1024
        """Tokens whose logits exist at once; a chunk takes (4 + bytes of the compute type) x this x vocabulary."""
        softcap: float | None = None
        """Bound of the logits, softcap * tanh(logits / softcap); None for none."""
        weight_gradient: WeightGradient = "float32"
        """How the weight's gradient is added up over the chunks: in float32 (4 bytes a parameter of the head, while the
        backward begins); weight_dtype, in the compute type, which in bfloat16 loses what is small; by_vocabulary, exact
        and without a sum in float32, for one more matmul with the weight (not for distillation and log-probs, which then add up in float32)."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.chunk_tokens < 1:
                yield Problem(
                    "chunk_tokens", self.chunk_tokens, "is not positive", "set one such as 1024"
                )
            if self.softcap is not None and self.softcap <= 0:
                yield Problem("softcap", self.softcap, "is not positive", "set None for no bound")

        def build(self, *, dim: int, vocab_size: int, init_std: float) -> "Head":
            """Make the head of a model of width ``dim``."""
            return Head(self, dim=dim, vocab_size=vocab_size, init_std=init_std)

    def __init__(self, config: Config, *, dim: int, vocab_size: int, init_std: float) -> None:
        super().__init__()
        self.config = config
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.chunk_tokens = config.chunk_tokens
        self.vocabulary: VocabularyShard | None = None
        self.fused = False
        """Compile what the loss does with a chunk's logits."""

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        *,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        operation: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """Sum of the cross-entropy over the labels that count: ``(B, S, D), (B, S) -> ()`` in float32.

        Args:
            hidden_states: ``(B, S, D)``; under sequence parallel ``(B, S/tp, D)``.
            labels: ``(B, S)``.
            z_loss: see `linear_cross_entropy`.
            label_smoothing: see there too.
            operation: what to compute instead, from the whole ``(B, S, D)``, while the weight is at hand; for the methods below.
        """
        if operation is not None:
            return operation(hidden_states)
        if labels is None:
            raise TypeError(
                "the loss needs labels; pass (B, S), or call another method of the head"
            )
        return linear_cross_entropy(
            hidden_states.flatten(0, 1),
            self.weight,
            labels.flatten(),
            chunk_tokens=self.chunk_tokens,
            vocabulary=self.vocabulary,
            softcap=self.config.softcap,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            weight_gradient=self.config.weight_gradient,
            fused=self.fused,
        )

    def logits(self, hidden_states: Tensor, places: Tensor) -> Tensor:
        """``(B, S, D), (N,) -> (N, V)`` in float32, of the whole vocabulary, without gradients: for generation and evaluation.

        Args:
            hidden_states: ``(B, S, D)``; under sequence parallel ``(B, S/tp, D)``.
            places: which of the B * S tokens the next one is asked for.
        """
        return self(
            hidden_states, operation=lambda states: self._logits(states.flatten(0, 1)[places])
        )

    def log_probs(
        self, hidden_states: Tensor, labels: Tensor, *, temperature: float = 1.0
    ) -> TokenLogProbs:
        """`token_log_probs` of ``(B, S, D)`` and ``(B, S)``: 2 x ``(B, S)``."""

        def compute(states: Tensor) -> TokenLogProbs:
            found = token_log_probs(
                states.flatten(0, 1),
                self.weight,
                labels.flatten(),
                chunk_tokens=self.chunk_tokens,
                vocabulary=self.vocabulary,
                softcap=self.config.softcap,
                temperature=temperature,
                accumulation=self._accumulation,
            )
            return TokenLogProbs(*(x.view_as(labels) for x in found))

        return self(hidden_states, operation=compute)

    def distillation(
        self,
        hidden_states: Tensor,
        teacher: "Head",
        teacher_states: Tensor,
        labels: Tensor,
        *,
        divergence: Divergence,
        teacher_share: float = 0.5,
        temperature: float = 1.0,
    ) -> Tensor:
        """`linear_distillation` from the head ``teacher``: ``(B, S, D), (B, S, D_t), (B, S) -> ()``."""

        def compute(states: Tensor, states_of_teacher: Tensor) -> Tensor:
            return linear_distillation(
                states.flatten(0, 1),
                self.weight,
                states_of_teacher.flatten(0, 1),
                teacher.weight,
                labels.flatten(),
                divergence=divergence,
                teacher_share=teacher_share,
                temperature=temperature,
                chunk_tokens=self.chunk_tokens,
                vocabulary=self.vocabulary,
                softcap=self.config.softcap,
                teacher_softcap=teacher.config.softcap,
                accumulation=self._accumulation,
            )

        def with_teacher(states: Tensor) -> Tensor:
            return teacher(teacher_states, operation=lambda theirs: compute(states, theirs))

        return self(hidden_states, operation=with_teacher)

    @property
    def _accumulation(self) -> Accumulation:
        how = self.config.weight_gradient
        return "float32" if how == "by_vocabulary" else how

    @torch.no_grad()
    def _logits(self, hidden_states: Tensor) -> Tensor:
        logits = cap((hidden_states @ self.weight.t()).float(), self.config.softcap)
        return logits if self.vocabulary is None else self.vocabulary.gather(logits)

    def loss_bytes(self, place: Place) -> tuple[int, int]:
        """Most bytes that the fused loss adds in its forward, and in its backward.

        The forward has both gradients so far and one chunk's logits with what is computed of them; the backward scales
        the gradients into new tensors. Where rows are packed some labels do not count, and the states of the others are
        copied: of nearly all, at most.
        """
        n_entries, dim = -(-len(self.weight) // place.tp), self.weight.shape[1]
        numel, b = n_entries * dim * self.weight.requires_grad, place.itemsize
        states = place.tokens * dim  # elements, as `numel`
        by_vocabulary = self.config.weight_gradient == "by_vocabulary"
        in_float32 = self.config.weight_gradient == "float32"
        held = (4 if in_float32 else b) * numel + (4 if by_vocabulary else b) * states
        chunk = min(self.chunk_tokens, place.tokens) * n_entries
        slope = 4 * chunk * (self.config.softcap is not None)
        product = b * states if by_vocabulary else 0
        if in_float32 and b < 4:
            product = b * min(n_entries, ROWS_AT_ONCE) * dim * self.weight.requires_grad
        logits = max(4 * chunk + slope, (4 + b * (b < 4)) * chunk + product)
        copied = b * states if place.packed else 0
        return held + logits + copied, held + b * (numel + states) + copied

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank has a part of the vocabulary, and computes its logits only."""
        return {"": VOCABULARY_OUT}

    def initializers(self) -> dict[str, Initializer]:
        """See `HasInitializers`."""
        return {"weight": Initializer(std=self.init_std)}
