"""Gradient norm and clipping, over whatever mesh the gradients lie on."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import torch_api

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ClipBy = Literal["all", "parameter"]


@dataclass(frozen=True, slots=True)
class Clip:
    """How gradients are clipped.

    Attributes:
        max_norm: largest norm that is left as it is; None for no clipping.
        by: the norm of all gradients together, or of each parameter's on its own.
    """

    max_norm: float | None = None
    by: ClipBy = "all"


Axes = tuple["DeviceMesh | None", tuple[int, ...]]
"""A mesh, and those of its dimensions along which a gradient is sharded."""


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], stages: "DeviceMesh | None" = None
) -> Tensor:
    """Euclidean norm of all gradients together, in float32, the same on every rank.

    Sums of squares are taken over local shards (on a CPU in float64: its float32 kernel adds one by one and is off by
    1e-4 for millions of elements), then added over the mesh axes along which a gradient is sharded;
    replicas count once.

    Args:
        parameters: those of this rank.
        stages: mesh axis whose ranks hold other parameters (pipeline stages); None if all ranks hold the same.

    Returns:
        Scalar float32 on the gradients' device; 0 if there are none.

    Raises:
        RuntimeError: if a gradient is a pending sum (a Partial placement), whose norm is not defined yet.
    """
    groups: dict[Axes, list[Tensor]] = defaultdict(list)
    device = None
    for parameter in parameters:
        grad, device = parameter.grad, parameter.device
        if grad is not None:
            local, axes = local_and_axes(grad)
            groups[axes].append(local)
    norms = {
        axes: list(torch._foreach_norm(grads, 2, dtype=_sum_dtype(grads[0])))  # pyright: ignore[reportPrivateImportUsage] - one kernel for all
        for axes, grads in groups.items()
    }
    return combine_norms(norms, device, stages)


@torch.no_grad()
def combine_norms(
    norms: Mapping[Axes, Sequence[Tensor]],
    device: torch.device | None,
    stages: "DeviceMesh | None" = None,
) -> Tensor:
    """The norm of all gradients from those of this rank's parts; see `global_grad_norm`.

    Args:
        norms: of the parts, by how they are sharded; the same keys in the same order on all ranks of a stage.
        device: of the result.
        stages: see `global_grad_norm`.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes, parts in norms.items():
        total = total + _sum_over(axes, torch.stack(list(parts)).square().sum())
    if stages is not None and stages.size() > 1:
        dist.all_reduce(total, group=stages.get_group())
    return total.sqrt().float()


def local_and_axes(grad: Tensor) -> tuple[Tensor, Axes]:
    """This rank's part of a gradient, and what is to be added over for a sum of the whole.

    Raises:
        RuntimeError: if it is a pending sum.
    """
    if not isinstance(grad, torch_api.DTensor):
        return grad, (None, ())
    if any(p.is_partial() for p in grad.placements):
        raise RuntimeError(f"gradient of placements {grad.placements} is not reduced yet")
    sharded = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
    return grad.to_local(), (grad.device_mesh, sharded)


def local_norm(local: Tensor) -> Tensor:
    """Euclidean norm of this rank's part of one gradient, scalar."""
    return torch.linalg.vector_norm(local, dtype=_sum_dtype(local))


def clip_one_gradient(local: Tensor, axes: Axes, norm: Tensor, max_norm: float) -> Tensor:
    """Scale one gradient in place by ``min(1, max_norm / its norm)``, without a host-device sync.

    Args:
        local: this rank's part of it.
        axes: from `local_and_axes`.
        norm: from `local_norm`.
        max_norm: largest norm that is left as it is.

    Returns:
        Norm of the whole gradient before, the same on all ranks that hold parts of it.
    """
    whole = _sum_over(axes, norm.square()).sqrt()
    local.mul_((max_norm / (whole + 1e-6)).clamp(max=1.0).to(local.dtype))
    return whole


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by ``min(1, max_norm / norm)``, without a host-device sync.

    Args:
        parameters: those whose gradients ``norm`` was taken of.
        norm: from `global_grad_norm`.
        max_norm: largest norm that is left as it is.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, torch_api.DTensor) else g for g in grads]
    if local:
        torch._foreach_mul_(local, factor.to(local[0].device))  # pyright: ignore[reportPrivateImportUsage] - as above


def _sum_dtype(local: Tensor) -> torch.dtype:
    return torch.float64 if local.device.type == "cpu" else torch.float32


def _sum_over(axes: Axes, value: Tensor) -> Tensor:
    """Add a scalar up over the ranks that hold the parts, in place."""
    mesh, sharded = axes
    if mesh is not None:
        for axis in sharded:
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value
