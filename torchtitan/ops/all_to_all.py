"""All-to-all between the tokens and the heads of a layer, with its gradient."""

# Shapes: B batch rows, S tokens of a row, H heads, Dh head dim; "/cp" = this rank's part.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tokens_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(B, S/cp, H, Dh) -> (B, S, H/cp, Dh)``: all tokens of a part of the heads; the ranks hold neighbouring tokens.

    Raises:
        ValueError: if the ranks do not divide the heads.
    """
    size = dist.get_world_size(group)
    if x.shape[2] % size:
        raise ValueError(
            f"{x.shape[2]} heads do not divide among {size} ranks; pass a multiple of {size}"
        )
    return _TokensToHeads.apply(x, group)


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(B, S, H/cp, Dh) -> (B, S/cp, H, Dh)``: the inverse of `tokens_to_heads`."""
    return _HeadsToTokens.apply(x, group)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad_outputs[0], ctx.group), None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad_outputs[0], ctx.group), None


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.unflatten(2, (dist.get_world_size(group), -1))  # (B, S/cp, cp, H/cp, Dh)
    received = _swap(sent.permute(2, 0, 1, 3, 4), group)  # (cp, B, S/cp, H/cp, Dh)
    return received.transpose(0, 1).flatten(1, 2)  # (B, S, H/cp, Dh)


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.unflatten(1, (dist.get_world_size(group), -1))  # (B, cp, S/cp, H/cp, Dh)
    received = _swap(sent.transpose(0, 1), group)  # (cp, B, S/cp, H/cp, Dh)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, S/cp, H, Dh)


def _swap(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Entry i of the first dim goes to rank i, and entry i of the result came from there."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
