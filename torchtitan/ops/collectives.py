"""Collectives over the tensor-parallel ranks, as plain functions of plain tensors and with their backwards.

They are the functional operators of torch with the wait inside, so that no pending tensor gets out, and torch.compile traces them (and
can overlap them with matmuls). Each pair is Megatron's: the backward of a sum is a copy, that of a gather a scattered sum (arXiv:1909.08053, 2205.05198).
"""

# Shapes: N ranks; S the dimension that is divided over them; "..." other dimensions.

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Combine the ranks' tensors elementwise, out of place: ``(...) -> (...)``; no backward."""
    return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), op, group.group_name))


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Lay the ranks' parts end to end: ``(..., S/N, ...) -> (..., S, ...)``; no backward."""
    n = group.size()
    parts = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), n, group.group_name))
    return parts if dim == 0 else torch.cat(parts.chunk(n), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Add the ranks' tensors up and keep this rank's part: ``(..., S, ...) -> (..., S/N, ...)``; no backward."""
    n = group.size()
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(n, dim=dim))
    return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts, "sum", n, group.group_name))


def gather_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`all_gather`; each rank uses the whole for a summand of its own, so the backward is `reduce_scatter`."""
    return _GatherParts.apply(x, dim, group)


def sum_to_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter`; the backward is `all_gather`."""
    return _SumToParts.apply(x, dim, group)


def sum_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`all_reduce`; what follows is the same on all ranks, so the backward hands the gradient on."""
    return _SumToAll.apply(x, group)


def copy_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x``, which is the same on all ranks; each uses it for a summand of its own, so the backward is `all_reduce`."""
    return _CopyToAll.apply(x, group)


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter(grad_outputs[0], ctx.dim, ctx.group), None, None


class _SumToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(grad_outputs[0], ctx.dim, ctx.group), None, None


class _SumToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return grad_outputs[0], None


class _CopyToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(grad_outputs[0], ctx.group), None
