"""Gradient norm and clipping, over whatever mesh the gradients lie on."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import torch_api

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    groups: dict[tuple[object, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    device = None
    for parameter in parameters:
        grad, device = parameter.grad, parameter.device
        if grad is None:
            continue
        if isinstance(grad, torch_api.DTensor):
            if any(p.is_partial() for p in grad.placements):
                raise RuntimeError(f"gradient of placements {grad.placements} is not reduced yet")
            sharded = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
            groups[grad.device_mesh, sharded].append(grad.to_local())
        else:
            groups[None, ()].append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, sharded_axes), grads in groups.items():
        dtype = torch.float64 if grads[0].device.type == "cpu" else torch.float32
        norms = torch._foreach_norm(grads, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage] - one kernel for all
        square = torch.stack(norms).square().sum()
        for axis in sharded_axes:
            dist.all_reduce(square, group=mesh.get_group(axis))  # pyright: ignore[reportAttributeAccessIssue] - a DeviceMesh
        total = total + square
    if stages is not None and stages.size() > 1:
        dist.all_reduce(total, group=stages.get_group())
    return total.sqrt().float()


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
