"""The decoder-only transformer, built from swappable layers."""

# Shapes: B batch, S sequence, D dim, Dh head dim. "/tp" = local to a TP rank.

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn

from torchtitan.config.configurable import Problem
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.embedding import Embedding
from torchtitan.models.layers.feed_forward import FeedForward, SwiGLU
from torchtitan.models.layers.head import Head
from torchtitan.models.layers.linear import Linear
from torchtitan.models.layers.mask import Mask
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.plan import SEQUENCE, Cut
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.layers.rope_scaling import YarnScaling
from torchtitan.models.layers.tape import Place, Tape, Value, record
from torchtitan.models.model import Model, ParameterCounts
from torchtitan.parallel.degrees import Degrees, divisors


class Decoder(Model):
    """Embedding, pre-norm blocks of attention and feed-forward, final norm; the head stands beside them."""

    batch_fields = ("tokens", "positions", "document_ids")

    @dataclass(kw_only=True, slots=True)
    class Config(Model.Config):
        """Settings of `Decoder`."""

        OPERATIONAL = frozenset({"hf_model_type", "context_length"})

        dim: int
        """Width of the residual stream."""
        n_layers: int
        """Number of blocks."""
        attention: GQA.Config
        """Attention of every block."""
        feed_forward: FeedForward.Config
        """Feed-forward layer of every block, dense or with experts."""
        first_k_dense: int = 0
        """Blocks at the start that have `dense_feed_forward` instead."""
        dense_feed_forward: SwiGLU.Config | None = None
        """Feed-forward layer of the first `first_k_dense` blocks."""
        norm: RMSNorm.Config = field(default_factory=RMSNorm.Config)
        """Norm before each layer and before the head."""
        rope: RoPE.Config = field(default_factory=RoPE.Config)
        """Position embedding."""
        head: Head.Config = field(default_factory=Head.Config)
        """Output head."""
        tied: bool = False
        """Use the embedding's weight as the head's."""
        hf_model_type: str = ""
        """`model_type` under which weights are exchanged with Hugging Face folders; empty for none."""
        context_length: int | None = None
        """Tokens that the model is made for, as told to users of an exported folder; rows may not be longer. None for
        unknown."""
        init_std: float = 0.02
        """Standard deviation of the weights at the start; projections into the residual stream get
        init_std / sqrt(2 * n_layers), the head at most 1 / sqrt(dim)."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("vocab_size", "dim", "n_layers"):
                if getattr(self, name) < 1:
                    yield Problem(name, getattr(self, name), "is not positive", "set at least 1")
            if self.init_std <= 0:
                yield Problem("init_std", self.init_std, "is not positive", "set one such as 0.02")
            for problem in self.feed_forward.check_dim(self.dim):
                yield problem.within("feed_forward")
            if not 0 <= self.first_k_dense <= self.n_layers:
                yield Problem(
                    "first_k_dense",
                    self.first_k_dense,
                    f"is not between 0 and n_layers={self.n_layers}",
                    "choose from that range",
                )
            if (self.dense_feed_forward is None) != (self.first_k_dense == 0):
                yield Problem(
                    "first_k_dense",
                    self.first_k_dense,
                    f"and dense_feed_forward={'None' if self.dense_feed_forward is None else 'SwiGLU.Config'} "
                    "do not go together",
                    "set both, or 0 and None",
                )
            heads = self.attention.n_heads
            if self.attention.head_dim is None and heads > 0 and self.dim % (2 * heads):
                yield Problem(
                    "attention.n_heads",
                    heads,
                    f"makes heads of dim={self.dim} / {heads} features, which is not an even number",
                    "choose n_heads so that dim is a multiple of 2 * n_heads, or set attention.head_dim",
                )

        @property
        def n_blocks(self) -> int:
            """See `Model.Config.n_blocks`."""
            return self.n_layers

        def check_degrees(self, degrees: Degrees, seq_len: int) -> Iterator[Problem]:
            """See `Model.Config.check_degrees`."""
            del seq_len
            yield from self._check_tp(degrees)
            for problem in self.attention.check_dealt(degrees.tp, degrees.ulysses):
                yield problem.within("attention")
            if degrees.pp > self.n_layers > 0:
                yield Problem(
                    "n_layers",
                    self.n_layers,
                    f"is fewer than parallelism.pp={degrees.pp}, and each rank of a pipeline needs a block",
                    f"set parallelism.pp to {self.n_layers} or less",
                )
            lendable = degrees.dp_shard * degrees.cp * degrees.tp
            for problem in self.feed_forward.check_ep(degrees.ep, lendable):
                yield problem.within("feed_forward")

        def check_one_graph(self) -> Iterator[Problem]:
            """See `Model.Config.check_one_graph`."""
            if not self.feed_forward.ONE_GRAPH:
                yield Problem(
                    "feed_forward",
                    type(self.feed_forward).__qualname__,
                    "is run as it is written, since its shapes depend on the tokens, but compile.fullgraph=True wants each "
                    "block to be one graph",
                    "set compile.fullgraph=False, which compiles the rest of the block, or compile.enabled=False",
                )

        def check_seq_len(self, seq_len: int) -> Iterator[Problem]:
            """See `Model.Config.check_seq_len`."""
            longest, scaling = self.context_length, self.rope.scaling
            if longest is not None and isinstance(scaling, YarnScaling.Config):
                # Hugging Face's config.json may tell the length before the scaling.
                longest = max(longest, int(scaling.factor * scaling.original_context))
            if longest is not None and seq_len > longest:
                yield Problem(
                    "seq_len",
                    seq_len,
                    f"is more than the {longest} tokens that the model is made for (model.context_length)",
                    f"set at most {longest}; to train the model for longer texts, set model.context_length={seq_len} "
                    "(and model.rope.scaling)",
                )

        def _check_tp(self, degrees: Degrees) -> Iterator[Problem]:
            """Yield what keeps the layers from being divided over the tp ranks."""
            tp = degrees.tp
            parts: dict[str, GQA.Config | FeedForward.Config | None] = {
                "attention": self.attention,
                "feed_forward": self.feed_forward,
                "dense_feed_forward": self.dense_feed_forward,
            }
            sizes = {
                f"{name}.{key}": size
                for name, part in parts.items()
                if part is not None
                for key, size in part.divided_sizes().items()
            }
            fitting = divisors(math.gcd(*sizes.values()))
            valid = [n for n in fitting if self._every_rank_has_entries(n)]
            for path, size in sizes.items():
                if size % tp:
                    yield Problem(
                        path,
                        size,
                        f"does not divide by parallelism.tp={tp}",
                        f"set parallelism.tp to one of {valid}",
                    )
            if not self._every_rank_has_entries(tp):
                yield Problem(
                    "vocab_size",
                    self.vocab_size,
                    f"leaves some of the parallelism.tp={tp} ranks without an entry",
                    f"set parallelism.tp to one of {valid}",
                )
            for problem in self.feed_forward.check_stream(tp, degrees.sequence_shards):
                yield problem.within("feed_forward")

        def _every_rank_has_entries(self, tp: int) -> bool:
            """Whether the vocabulary, dealt in equal parts of which the last may be smaller, reaches all ``tp`` ranks."""
            return (tp - 1) * -(-self.vocab_size // tp) < self.vocab_size

        def build(self) -> "Decoder":
            """Make the decoder."""
            return Decoder(self)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.is_first = self.is_last = True
        self.embedding = Embedding(config.vocab_size, config.dim, init_std=config.init_std)
        self.layers = nn.ModuleList(DecoderBlock(config, i) for i in range(config.n_layers))
        self.norm = config.norm.build(config.dim)
        head_std = min(
            config.init_std, config.dim**-0.5
        )  # logits below 1: the loss starts near ln V
        self.head = config.head.build(
            dim=config.dim, vocab_size=config.vocab_size, init_std=head_std
        )
        if config.tied:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)
        self.rope = config.rope.build(config.attention.resolved_head_dim(config.dim))

    def forward(
        self, tokens: Tensor, positions: Tensor, document_ids: Tensor | None = None
    ) -> Tensor:
        """``(B, S) -> (B, S, D)`` hidden states, after the final norm (which is in the last stage of a pipeline).

        Under sequence parallel the residual stream is ``(B, S/tp, D)`` from the embedding to the head.

        Args:
            tokens: ``(B, S)`` ids; in a later stage of a pipeline, the ``(B, S, D)`` hidden states of the one before.
            positions: ``(B, S)``, from 0 in each document.
            document_ids: ``(B, S)``, equal for tokens that may attend to each other; None when every row is one
                document.
        """
        rope = self.rope(positions)  # 2 x (B, S, 1, Dh)
        mask = Mask(document_ids)
        for block in self.layers:
            if isinstance(block, DecoderBlock):
                block.attention.prepare(mask, positions.shape[1], positions.device)
        hidden_states = self.embedding(tokens) if self.is_first else tokens  # (B, S/tp, D)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rope, mask)
        return self.norm(hidden_states) if self.is_last else hidden_states

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`; embedding, blocks and head have their own."""
        return {"norm": SEQUENCE} if self.is_last else {}

    def blocks(self) -> Sequence[nn.Module]:
        """See `Model.blocks`."""
        return list(self.layers)

    def edge_units(self) -> Sequence[nn.Module]:
        """See `Model.edge_units`; a tied table with both its users stays with the whole."""
        if self.config.tied and self.is_first and self.is_last:
            return []
        first = [self.embedding] if self.is_first else []
        return [*first, self.head] if self.is_last else first

    def keep(self, blocks: range, first: bool, last: bool) -> None:
        """See `Model.keep`."""
        kept = nn.ModuleList()
        for i in blocks:
            kept.add_module(str(i), self.layers[i])
        self.layers = kept
        self.is_first, self.is_last = first, last
        if not first:
            del self.embedding
        if not last:
            del self.norm, self.head

    def stage_shape(self, rows: int, seq_len: int) -> tuple[int, ...]:
        """See `Model.stage_shape`."""
        return rows, seq_len, self.config.dim

    def shared_parameters(self) -> Mapping[str, str]:
        """See `Model.shared_parameters`."""
        return {"head.weight": "embedding.weight"} if self.config.tied else {}

    def record_end(self, tape: Tape, x: Value) -> Value:
        """See `Model.record_end`."""
        return record(self.norm, tape, x) if self.is_last else x

    def shared_bytes(self, place: Place) -> int:
        """See `Model.shared_bytes`: RoPE's tables, the batch's four integers a token, and on a GPU the mask of packed rows."""
        tables = 2 * 4 * place.tokens * self.rope.head_dim
        masked = place.gpu and place.packed and place.cp == 1
        return tables + 4 * 8 * place.tokens + masked * place.rows * place.seq_len**2

    def parameter_counts(self) -> ParameterCounts:
        """See `Model.parameter_counts`."""
        matmul = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear | Head))
        experts = [m.expert_parameters() for m in self.modules() if isinstance(m, MoE)]
        used = sum(active for _, active in experts)
        total = sum(p.numel() for p in self.parameters())
        return ParameterCounts(
            total=total,
            active=total - sum(every for every, _ in experts) + used,
            matmul=matmul + used,
            embedding=self.embedding.weight.numel(),
        )

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """See `Model.flops_per_token`: ``6 * P_matmul + 6 * L * H * 2 * Dh * S``, the second halved when causal."""
        scores = sum(
            m.score_flops_per_token(seq_len, causal=causal)
            for m in self.modules()
            if isinstance(m, GQA)
        )
        return 6.0 * self.parameter_counts().matmul + scores


class DecoderBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, config: Decoder.Config, index: int) -> None:
        super().__init__()
        residual_std = config.init_std / (2 * config.n_layers) ** 0.5
        self.attention_norm = config.norm.build(config.dim)
        self.attention = config.attention.build(
            dim=config.dim, init_std=config.init_std, residual_std=residual_std
        )
        self.feed_forward_norm = config.norm.build(config.dim)
        dense = config.dense_feed_forward if index < config.first_k_dense else None
        self.feed_forward = (dense or config.feed_forward).build(
            dim=config.dim, init_std=config.init_std, residual_std=residual_std
        )

    def forward(self, hidden_states: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """``(B, S/tp, D) -> (B, S/tp, D)``; tables and mask are those of the whole sequence."""
        hidden_states = hidden_states + self.attention(
            self.attention_norm(hidden_states), rope, mask
        )
        return hidden_states + self.feed_forward(self.feed_forward_norm(hidden_states))

    def record(self, tape: Tape, x: Value) -> Value:
        """See `Recorded`."""
        for norm, layer in (
            (self.attention_norm, self.attention),
            (self.feed_forward_norm, self.feed_forward),
        ):
            x = tape.add(x, record(layer, tape, record(norm, tape, x)))
        return x

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`; attention and feed-forward have their own."""
        return {"attention_norm": SEQUENCE, "feed_forward_norm": SEQUENCE}
