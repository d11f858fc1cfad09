"""Attention of packed documents on a CPU as one operator, which torch.compile and checkpointing take as a whole."""

# Shapes: B batch, S sequence, H query heads, K kv heads, Dh head dim, N = B * S tokens, L tokens of a document.

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, *, causal: bool, window: int | None
) -> Tensor:
    """Softmax attention within each document: ``(B, S, H, Dh), 2 x (B, S, K, Dh) -> (B, S, H, Dh)``.

    The same kernel, document by document, as the eager path of ``SDPA``; the loop over documents, whose number is
    only known at run time, is inside the operator.

    Args:
        q: ``(B, S, H, Dh)`` on a CPU.
        k: ``(B, S, K, Dh)``, K a divisor of H.
        v: ``(B, S, K, Dh)``.
        document_ids: ``(B, S)``, equal within a document, rising along each row.
        causal: False lets a query attend to later keys too.
        window: keys that a query sees, itself included; None for all.
    """
    return _attention(q, k, v, document_ids, causal, window)[0]


@torch.library.custom_op("torchtitan::document_attention", mutates_args=(), device_types="cpu")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output ``(B, S, H, Dh)``, and the logarithm of the softmax's norm ``(N, H)`` in float32."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    norm = q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    flat, flat_out = [t.flatten(0, 1) for t in (q, k, v)], out.flatten(0, 1)
    for part in _documents(document_ids):
        query, key, value = (_heads_first(t[part]) for t in flat)  # (1, H|K, L, Dh)
        is_causal, mask = _mask(query, causal, window)
        result, log_norm = _flash(query, key, value, 0.0, is_causal, attn_mask=mask)
        flat_out[part] = result[0].transpose(0, 1)  # (L, H, Dh)
        norm[part] = log_norm[0].transpose(0, 1)  # (L, H)
    return out, norm


OPERATOR = torch.ops.torchtitan.document_attention.default
"""For policies that name operators, such as that of selective checkpointing."""


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    norm = q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), norm


@torch.library.custom_op(
    "torchtitan::document_attention_backward", mutates_args=(), device_types="cpu"
)
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    document_ids: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes."""
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    flat = [t.flatten(0, 1) for t in (grad, q, k, v, out)]
    for part in _documents(document_ids):
        given, query, key, value, result = (_heads_first(t[part]) for t in flat)
        is_causal, mask = _mask(query, causal, window)
        log_norm = norm[part].transpose(0, 1)[None]  # (1, H, L)
        grads = _flash_backward(
            given, query, key, value, result, log_norm, 0.0, is_causal, attn_mask=mask
        )
        for whole, one in zip(made, grads, strict=True):
            whole.flatten(0, 1)[part] = one[0].transpose(0, 1)  # (L, H|K, Dh)
    return made[0], made[1], made[2]


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return q, k, v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, document_ids)


def _backward(ctx: Any, grad: Tensor, grad_norm: Tensor) -> tuple[Tensor | None, ...]:
    del grad_norm  # the norm is not handed out
    q, k, v, out, norm, document_ids = ctx.saved_tensors
    grads = _attention_backward(grad, q, k, v, out, norm, document_ids, ctx.causal, ctx.window)
    return *grads, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _documents(document_ids: Tensor) -> Iterator[slice]:
    """Where each document lies in the rows laid end to end."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    offsets = [*starts.flatten().nonzero().squeeze(1).tolist(), document_ids.numel()]
    return (slice(start, end) for start, end in pairwise(offsets))


def _heads_first(tokens: Tensor) -> Tensor:
    """``(L, H|K, Dh) -> (1, H|K, L, Dh)``."""
    return tokens.transpose(0, 1)[None]


def _mask(query: Tensor, causal: bool, window: int | None) -> tuple[bool, Tensor | None]:
    """How the kernel is told what a query sees: ``is_causal``, or an additive mask."""
    length = query.shape[2]
    if window is None or length <= window:
        return causal, None
    at = torch.arange(length)
    back = at[:, None] - at[None, :]  # (L, L), how far the key lies behind the query
    sees = (back < window) & (back >= 0 if causal else back > -window)
    return False, torch.zeros_like(back, dtype=query.dtype).masked_fill_(~sees, float("-inf"))
