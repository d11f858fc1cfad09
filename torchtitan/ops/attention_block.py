"""Attention over a part of the keys, with the log-sum-exp that lets parts be merged.

Softmax over a union of key sets is a weighted sum of the softmaxes over each: a part returns its output and the
logarithm of its normaliser, and `merge` combines them (FlashAttention-2, arXiv:2307.08691, section 3.1). The backward of
a part needs only the *merged* output and log-sum-exp.
"""

# Shapes: B batch rows, H query heads, K kv heads, Q queries, S keys of the part, Dh head dim of q and k, Dv of v.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
QUERIES_AT_ONCE = 512
"""Queries whose scores exist at once where no fused kernel fits."""


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys of a part a query sees, by distance: a mask that is made when it is used.

    Attributes:
        offset: place of the first query minus place of the first key.
        causal: a key must not be later than the query.
        window: a key must be less than this many tokens away; None for no limit.
    """

    offset: int
    causal: bool
    window: int | None

    def dense(self, n_queries: int, n_keys: int, device: torch.device) -> Tensor:
        """True where a query (rows) sees a key (columns): ``(Q, S)`` bool."""
        q = torch.arange(self.offset, self.offset + n_queries, device=device)
        back = q[:, None] - torch.arange(n_keys, device=device)  # (Q, S)
        allowed = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (back < self.window) & (back > -self.window)
        return allowed


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, band: Band | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of queries over some keys; every query must see at least one of them.

    Args:
        q: ``(B, Q, H, Dh)``.
        k: ``(B, S, K, Dh)``; K divides H.
        v: ``(B, S, K, Dv)``.
        band: which keys a query sees; None for all.

    Returns:
        The output ``(B, Q, H, Dv)`` in the type of ``q``, and the log-sum-exp of the scaled scores ``(B, H, Q)``, float32.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H|K, Q|S, Dh|Dv)
    kernel, causal, bias = _choose(q, k, v, band)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
    elif kernel == "cuda":
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        out, lse = _plain_forward(q, k, v, band)
    return out.transpose(1, 2), lse


def block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of ``q``, ``k`` and ``v``, in their shapes.

    Args:
        grad_out: gradient of ``out``.
        q: as in `block_forward`.
        k: as in `block_forward`.
        v: as in `block_forward`.
        out: ``(B, Q, H, Dv)``, merged over all keys.
        lse: ``(B, H, Q)``, merged over all keys.
        band: as in `block_forward`.
    """
    grad_out, q, k, v, out = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
    kernel, causal, bias = _choose(q, k, v, band)
    grads: tuple[Tensor, ...]
    if kernel == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
    elif kernel == "cuda":
        unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # state of a dropout of 0
        sizes: tuple[Any, ...] = (None, None, q.shape[2], k.shape[2])
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, unused, unused
        )
    else:
        grads = _plain_backward(grad_out, q, k, v, out, lse, band)
    grad_q, grad_k, grad_v = (t.transpose(1, 2) for t in grads)
    return grad_q, grad_k, grad_v


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Add a part to what was merged before, in place.

    Args:
        out: ``(B, Q, H, Dv)`` float32, anything where ``lse`` is -inf.
        lse: ``(B, H, Q)`` float32, -inf where there was no part yet.
        part_out: ``(B, Q, H, Dv)``.
        part_lse: ``(B, H, Q)``, finite.
    """
    both = torch.logaddexp(lse, part_lse)  # (B, H, Q)
    old, new = (
        (x - both).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse)
    )  # (B, Q, H, 1)
    out.mul_(old).add_(part_out.float() * new)
    lse.copy_(both)


def _choose(q: Tensor, k: Tensor, v: Tensor, band: Band | None) -> tuple[str, bool, Tensor | None]:
    """The kernel, whether it is to be causal by itself, and else the additive mask that it needs."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    causal = band == Band(0, causal=True, window=None) and n_queries == n_keys
    if q.shape[-1] == v.shape[-1]:
        if q.device.type == "cpu":
            return "cpu", causal, None if band is None or causal else _bias(q, n_keys, band)
        half = q.dtype in (torch.bfloat16, torch.float16)
        if (
            q.is_cuda
            and half
            and (band is None or causal)
            and q.shape[-1] % 8 == 0
            and q.shape[-1] <= 256
        ):
            return "cuda", causal, None
    return "plain", causal, None


def _bias(q: Tensor, n_keys: int, band: Band) -> Tensor:
    """0 where a query sees a key, else -inf: ``(Q, S)`` in the type of ``q``."""
    allowed = band.dense(q.shape[2], n_keys, q.device)
    return torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, float("-inf"))


def _scores(q: Tensor, k: Tensor, band: Band | None, start: int) -> Tensor:
    """Scaled and masked scores of the queries from ``start`` on, float32: ``(B, K, H/K, Q, S)``."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if band is not None:
        here = Band(band.offset + start, band.causal, band.window)
        scores = scores.masked_fill(~here.dense(q.shape[-2], k.shape[-2], q.device), float("-inf"))
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, band: Band | None) -> tuple[Tensor, Tensor]:
    n_groups = k.shape[1]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])  # (B, H, Q, Dv)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)  # (B, H, Q)
    k, v = k[:, :, None], v[:, :, None]  # (B, K, 1, S, Dh|Dv)
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        grouped = q[:, :, some].unflatten(1, (n_groups, -1))  # (B, K, H/K, Q, Dh)
        scores = _scores(grouped, k, band, start)  # (B, K, H/K, Q, S)
        norm = scores.logsumexp(-1, keepdim=True)
        out[:, :, some] = ((scores - norm).exp() @ v.float()).flatten(1, 2)
        lse[:, :, some] = norm.squeeze(-1).flatten(1, 2)
    return out, lse


def _plain_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band | None
) -> tuple[Tensor, Tensor, Tensor]:
    n_groups, scale = k.shape[1], q.shape[-1] ** -0.5
    grad_q = torch.empty_like(q, dtype=torch.float32)
    grad_k, grad_v = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
    k, v = k[:, :, None].float(), v[:, :, None].float()  # (B, K, 1, S, Dh|Dv)
    for start in range(0, q.shape[2], QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        q_, grad_, out_, lse_ = (
            t[:, :, some].float().unflatten(1, (n_groups, -1))
            for t in (q, grad_out, out, lse.unsqueeze(-1))
        )  # (B, K, H/K, Q, Dh|Dv|Dv|1)
        weights = (_scores(q_, k, band, start) - lse_).exp()  # (B, K, H/K, Q, S)
        grad_v += (weights.mT @ grad_).sum(2)
        delta = (grad_ * out_).sum(-1, keepdim=True)  # (B, K, H/K, Q, 1)
        grad_scores = weights * (grad_ @ v.mT - delta) * scale
        grad_q[:, :, some] = (grad_scores @ k).flatten(1, 2)
        grad_k += (grad_scores.mT @ q_).sum(2)
    return grad_q, grad_k, grad_v
