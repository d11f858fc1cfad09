"""All-to-all between the tokens and the heads of a layer, with its gradient."""

# Shapes: B batch rows, S tokens of a row, H heads, Dh head dim; "/cp" = this rank's part.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan import torch_api


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
    sent = x.unflatten(2, (size, -1))  # (B, S/cp, cp, H/cp, Dh)
    received = swap(sent.permute(2, 0, 1, 3, 4), group)  # (cp, B, S/cp, H/cp, Dh)
    return received.transpose(0, 1).flatten(1, 2)  # (B, S, H/cp, Dh)


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(B, S, H/cp, Dh) -> (B, S/cp, H, Dh)``: the inverse of `tokens_to_heads`."""
    sent = x.unflatten(1, (dist.get_world_size(group), -1))  # (B, cp, S/cp, H/cp, Dh)
    received = swap(sent.transpose(0, 1), group)  # (cp, B, S/cp, H/cp, Dh)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, S/cp, H, Dh)


def swap(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Entry i of the first dim goes to rank i, and entry i of the result came from there: ``(cp, ...) -> (cp, ...)``.

    Its own inverse, and its own gradient. One operator, which torch.compile takes as a whole.
    """
    return _swap(x, group.group_name)


def named_group(name: str) -> dist.ProcessGroup:
    """The group of a name: operators take the name, as they cannot take a group."""
    return torch_api.resolve_process_group(name)  # pyright: ignore[reportArgumentType] - a NewType of str


@torch.library.custom_op("torchtitan::swap", mutates_args=())
def _swap(x: Tensor, group: str) -> Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=named_group(group))
    return received


OPERATOR = torch.ops.torchtitan.swap.default
"""For policies that name operators, such as that of selective checkpointing."""


@_swap.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _swap(grad, ctx.group), None


_swap.register_autograd(_backward, setup_context=_setup_context)
