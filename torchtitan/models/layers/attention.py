"""Grouped-query attention, and the scaled-dot-product backend inside it."""

# Shapes: B batch, S sequence, D dim, H query heads, K kv heads, Dh head dim. "/tp" = local to a TP rank.

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.linear import Linear
from torchtitan.models.layers.mask import Mask
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.plan import COLWISE, HEADS, ROWWISE, WHOLE_INPUT, Cut
from torchtitan.models.layers.rope import apply_rope
from torchtitan.models.layers.tape import Op, Place, Tape, Value
from torchtitan.ops.document_attention import document_attention


class InnerAttention(nn.Module):
    """``softmax(q k^T / sqrt(Dh)) v`` over the keys that a mask allows, without parameters: the swappable backend.

    A mixer of tokens around it (such as `GQA`) makes q, k and v. Whoever wants to compute the same attention
    otherwise (spread over ranks) puts its own `InnerAttention` in the place of this one.
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(B, S, H, Dh), (B, S, K, Dh), (B, S, K, Dv) -> (B, S, H, Dv)``; K divides H."""

    def prepare(self, mask: Mask, seq_len: int, device: torch.device) -> None:
        """Make what ``forward`` needs of ``mask``, outside of a block that may be compiled or recomputed.

        Args:
            mask: of this layer's window.
            seq_len: S, of the tokens that this rank holds.
            device: of the tokens.
        """
        del mask, seq_len, device

    def alone(self) -> "InnerAttention":
        """The backend for rows that are whole on this rank: itself, unless it is one that brings ranks together."""
        return self


class SDPA(InnerAttention, Configurable):
    """Inner attention on ``torch.nn.functional.scaled_dot_product_attention``.

    Packed documents: on a CPU each document is its own causal call (6 to 14 times faster there than a dense mask
    at 4,096 tokens); on a GPU one call with a boolean mask that all layers share, since document lengths would
    have to be read back to the host.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """`SDPA` has no settings."""

        def build(self) -> "SDPA":
            """Make the backend."""
            return SDPA()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(B, S, H, Dh), 2 x (B, S, K, Dh) -> (B, S, H, Dh)``."""
        if mask.document_ids is not None and q.device.type == "cpu":
            if is_compiling():  # one operator, so that the block stays one graph
                return document_attention(
                    q, k, v, mask.document_ids, causal=mask.causal, window=mask.window
                )
            lengths = mask.document_lengths
            if lengths is not None:
                return self._per_document(q, k, v, mask, lengths)
            if mask.window is None:
                return _attend(q, k, v, is_causal=mask.causal)
        if mask.window is None and mask.document_ids is None:
            return _attend(q, k, v, is_causal=mask.causal)
        return _attend(q, k, v, attn_mask=mask.dense(q.shape[1], q.device))

    def prepare(self, mask: Mask, seq_len: int, device: torch.device) -> None:
        """Make what ``forward`` needs of ``mask`` outside of the blocks: one that is compiled or recomputed may not."""
        packed = mask.document_ids is not None
        if (packed and device.type != "cpu") or (not packed and mask.window is not None):
            mask.dense(seq_len, device)

    @staticmethod
    def _per_document(q: Tensor, k: Tensor, v: Tensor, mask: Mask, lengths: list[int]) -> Tensor:
        """Attend within each document: rows are laid end to end and split, so the backward is one concatenation."""
        parts = (t.flatten(0, 1).split(lengths) for t in (q, k, v))  # each (L, H|K, Dh)
        single = Mask(causal=mask.causal, window=mask.window)
        outputs = []
        for q_doc, k_doc, v_doc in zip(*parts, strict=True):
            length = q_doc.shape[0]
            one = (q_doc[None], k_doc[None], v_doc[None])  # (1, L, H|K, Dh)
            if mask.window is None or length <= mask.window:
                out = _attend(*one, is_causal=mask.causal)
            else:
                out = _attend(*one, attn_mask=single._make_dense(length, q.device))
            outputs.append(out[0])
        return torch.cat(outputs).view_as(q)  # (B, S, H, Dh)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, attn_mask: Tensor | None = None
) -> Tensor:
    """``(B, S, H, Dh), 2 x (B, S, K, Dh) -> (B, S, H, Dh)``; SDPA itself wants heads before the sequence."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H|K, S, Dh)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


class GQA(nn.Module, Configurable):
    """Grouped-query attention (arXiv:2305.13245); with as many kv heads as query heads it is multi-head."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `GQA`."""

        n_heads: int
        """Query heads; a multiple of `n_kv_heads`."""
        n_kv_heads: int | None = None
        """Key/value heads; None means one per query head (multi-head attention)."""
        head_dim: int | None = None
        """Features of a head, even; None means dim / n_heads."""
        qkv_bias: bool = False
        """Learned biases on queries, keys and values."""
        window: int | None = None
        """Keys that a query sees, itself included; None for all."""
        qk_norm: RMSNorm.Config | None = None
        """Norm of each head's query and key before the position embedding; one weight for all heads. None for none."""
        inner: SDPA.Config = field(default_factory=SDPA.Config)
        """Backend that gets q, k, v and the mask."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.n_heads < 1:
                yield Problem("n_heads", self.n_heads, "is not positive", "set at least 1")
            elif self.n_kv_heads is not None and (
                self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads
            ):
                divisors = [n for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
                yield Problem(
                    "n_kv_heads",
                    self.n_kv_heads,
                    f"does not divide n_heads={self.n_heads}",
                    f"choose one of {divisors}",
                )
            if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
                yield Problem(
                    "head_dim",
                    self.head_dim,
                    "is not even and positive",
                    "RoPE turns pairs of features",
                )
            if self.window is not None and self.window < 1:
                yield Problem(
                    "window", self.window, "is not positive", "set None for full attention"
                )

        def check_dealt(self, tp: int, ulysses: int) -> Iterator[Problem]:
            """Yield a problem if the heads of a rank of ``tp`` cannot be dealt to ``ulysses`` ranks."""
            heads = self.n_heads // tp
            if ulysses == 1 or self.n_heads % tp or heads % ulysses == 0:
                return
            fitting = [n for n in range(1, heads + 1) if heads % n == 0]
            yield Problem(
                "n_heads",
                self.n_heads,
                f"leaves {heads} heads to a rank of tp={tp}, which cannot be dealt to cp={ulysses} ranks with "
                "context.kind=ulysses",
                f"set cp to one of {fitting}, or context.kind to all_gather or ring",
            )

        def build(self, *, dim: int, init_std: float, residual_std: float) -> "GQA":
            """Make the layer; ``residual_std`` is for the projection that writes to the residual stream."""
            return GQA(self, dim=dim, init_std=init_std, residual_std=residual_std)

        def divided_sizes(self) -> dict[str, int]:
            """Sizes by field that tensor parallelism divides: whole heads go to a rank."""
            n_kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
            return {"n_heads": self.n_heads, "n_kv_heads": n_kv_heads}

        def resolved_head_dim(self, dim: int) -> int:
            """Features of a head in a model of width ``dim``."""
            return self.head_dim if self.head_dim is not None else dim // self.n_heads

    def __init__(self, config: Config, *, dim: int, init_std: float, residual_std: float) -> None:
        super().__init__()
        self.head_dim = config.resolved_head_dim(dim)
        self.window = config.window
        q_dim = config.n_heads * self.head_dim
        kv_dim = (config.n_kv_heads or config.n_heads) * self.head_dim
        self.q_proj = Linear(dim, q_dim, bias=config.qkv_bias, init_std=init_std)
        self.k_proj = Linear(dim, kv_dim, bias=config.qkv_bias, init_std=init_std)
        self.v_proj = Linear(dim, kv_dim, bias=config.qkv_bias, init_std=init_std)
        self.out_proj = Linear(q_dim, dim, init_std=residual_std)
        self.q_norm = config.qk_norm and config.qk_norm.build(self.head_dim)
        self.k_norm = config.qk_norm and config.qk_norm.build(self.head_dim)
        self.inner: InnerAttention = config.inner.build()

    def forward(self, hidden_states: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """``(B, S, D) -> (B, S, D)``; ``rope`` is what `RoPE` made of the positions."""
        q = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # (B, S, H/tp, Dh)
        k = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # (B, S, K/tp, Dh)
        v = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # (B, S, K/tp, Dh)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out = self.inner(q, k, v, mask.windowed(self.window))  # (B, S, H/tp, Dh)
        return self.out_proj(out.flatten(2))  # (B, S, D)

    def record(self, tape: Tape, x: Value) -> Value:
        """See `Recorded`; a flash kernel keeps q, k, v, its output and the softmax's norm, 4 bytes a query and head."""
        tp = tape.place.tp
        x = tape.gather_stream(x)
        q, k, v = (
            tape.linear(x, m.out_features // tp, weight_numel=m.weight.numel() // tp)
            for m in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._record_head_norm(tape, q), self._record_head_norm(tape, k)
        q, k = self._record_rope(tape, q), self._record_rope(tape, k)
        out = Value(q.tokens, q.features, q.itemsize)
        gathered = tape.place.cp * (k.nbytes + v.nbytes) if tape.place.cp > 1 else 0
        tape.ops.append(
            Op(
                "attention",
                (q, k, v),
                out,
                saves=(q, k, v, out),
                keeps=4 * q.tokens * q.features // self.head_dim
                + self._mask_bytes(tape.place, out),
                scratch=gathered,
                backward_scratch=2 * gathered,
            )
        )
        numel = self.out_proj.weight.numel() // tp
        return tape.sum_stream(tape.linear(out, self.out_proj.out_features, weight_numel=numel))

    @staticmethod
    def _mask_bytes(place: Place, out: Value) -> int:
        """What packed documents cost: on a GPU the mask as an additive bias, on a CPU a copy of the documents' outputs."""
        if not place.packed or place.cp > 1:  # context parallel computes in pieces without a mask
            return 0
        return place.rows * place.seq_len**2 * out.itemsize if place.gpu else out.nbytes

    def _record_head_norm(self, tape: Tape, x: Value) -> Value:
        """Record `q_norm` or `k_norm`: each head is a row of its own."""
        heads = Value(x.tokens * x.features // self.head_dim, self.head_dim, x.itemsize)
        norm = self.q_norm
        if norm is None:
            raise ValueError("a layer without qk_norm has no head norm to record")
        scratch = Tape(tape.place)
        norm.record(scratch, heads)
        (op,) = scratch.ops
        return tape.elementwise(
            x,
            saves=bool(op.saves),
            keeps=op.keeps,
            scratch=op.scratch,
            backward_scratch=op.backward_scratch,
            weights=op.weights,
        )

    def _record_rope(self, tape: Tape, x: Value) -> Value:
        """Record `apply_rope`, which computes in float32 and keeps nothing of its own."""
        float32 = 4 * x.tokens * x.features
        return tape.elementwise(x, saves=False, scratch=4 * float32, backward_scratch=3 * float32)

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank has whole heads, and the whole sequence."""
        norms = {} if self.q_norm is None else {"q_norm": HEADS, "k_norm": HEADS}
        return {
            "": WHOLE_INPUT,
            "q_proj": COLWISE,
            "k_proj": COLWISE,
            "v_proj": COLWISE,
            "out_proj": ROWWISE,
            **norms,
        }

    def prepare(self, mask: Mask, seq_len: int, device: torch.device) -> None:
        """Let the backend make what it needs of ``mask``, once for all layers of a forward, before the blocks run."""
        self.inner.prepare(mask.windowed(self.window), seq_len, device)

    def score_flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Forward and backward FLOPs of the scores and their sum over values, per token.

        ``6 * H * (Dh_qk + Dh_v) * S``, halved when causal; the projections are counted with the parameters.
        """
        keys = seq_len if self.window is None else min(seq_len, self.window)
        flops = 6.0 * self.q_proj.out_features * 2 * keys
        return flops / 2 if causal and keys == seq_len else flops
