"""When parameters are updated: all after the backward, or each in it as soon as its gradient is complete."""

from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from torchtitan.optim.clipping import (
    Axes,
    Clip,
    clip_gradients,
    clip_one_gradient,
    combine_norms,
    global_grad_norm,
    local_and_axes,
    local_norm,
)
from torchtitan.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Updates(Protocol):
    """What the Trainer calls around a backward, in this order; the learning rate is set before."""

    def begin(self, bad: Tensor) -> None:
        """Before the step's backward. ``bad`` is a scalar float32, 1 where no step may update any more."""
        ...

    def clip(self) -> Tensor:
        """After the backward: the norm of all gradients before clipping, scalar float32, the same on every rank."""
        ...

    def finish(self, skip: Tensor) -> None:
        """The updates that are left to do; none where ``skip`` is 1. See `Optimizer.step`."""
        ...


class AfterBackward:
    """All parameters at once, when all gradients are there.

    Args:
        optimizer: of the parameters.
        clip: how gradients are clipped.
        stages: mesh axis of the pipeline's stages; see `global_grad_norm`.
    """

    def __init__(
        self, optimizer: Optimizer, clip: Clip, stages: "DeviceMesh | None" = None
    ) -> None:
        self._optimizer, self._clip, self._stages = optimizer, clip, stages

    def begin(self, bad: Tensor) -> None:
        """See `Updates.begin`."""

    @torch.no_grad()
    def clip(self) -> Tensor:
        """See `Updates.clip`."""
        parameters, max_norm = list(self._optimizer.slots), self._clip.max_norm
        norm = global_grad_norm(parameters, self._stages)
        if max_norm is not None and self._clip.by == "parameter":
            for parameter in parameters:
                if parameter.grad is not None:
                    local, axes = local_and_axes(parameter.grad)
                    clip_one_gradient(local, axes, local_norm(local), max_norm)
        elif max_norm is not None:
            clip_gradients(parameters, norm, max_norm)
        return norm

    def finish(self, skip: Tensor) -> None:
        """See `Updates.finish`."""
        self._optimizer.step(skip)


class InBackward:
    """Each parameter when its gradient is complete, which is then freed: at most one unit's gradients are alive.

    A hook on each parameter; FSDP2 calls it on the sharded parameter after the reduce-scatter. A gradient that is not
    finite masks its parameter's update and all that come after it in the step, on the ranks that hold a part of the
    bad ones; the norm then tells all ranks.

    Args:
        optimizer: of the parameters. The hooks stay for as long as they live.
        clip: each gradient by its own norm, or none.

    Raises:
        ValueError: if gradients are to be clipped by the norm of all of them.
    """

    def __init__(self, optimizer: Optimizer, clip: Clip) -> None:
        if clip.max_norm is not None and clip.by != "parameter":
            raise ValueError(
                f"max_norm={clip.max_norm} of all gradients together is not known before the last of them, and the first "
                "is used up by then; clip each parameter, or nothing"
            )
        self._optimizer, self._max_norm = optimizer, clip.max_norm
        self._norms: dict[nn.Parameter, tuple[Axes, Tensor]] = {}
        self._bad = torch.zeros(())
        for parameter in optimizer.slots:
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin(self, bad: Tensor) -> None:
        """See `Updates.begin`."""
        self._bad = bad

    def clip(self) -> Tensor:
        """See `Updates.clip`; the clipping is done."""
        by_axes: dict[Axes, list[Tensor]] = defaultdict(list)
        for parameter in self._optimizer.slots:  # not as they came: the same order in every step
            if parameter in self._norms:
                axes, norm = self._norms[parameter]
                by_axes[axes].append(norm)
        self._norms.clear()
        return combine_norms(by_axes, self._bad.device)

    def finish(self, skip: Tensor) -> None:
        """See `Updates.finish`; nothing is left."""

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        """The hook: note the norm, clip, update, free."""
        if parameter.grad is None:
            return
        local, axes = local_and_axes(parameter.grad)
        norm = local_norm(local)
        self._norms[parameter] = axes, norm
        if self._max_norm is not None:
            norm = clip_one_gradient(local, axes, norm, self._max_norm)
        self._bad = torch.maximum(self._bad, (~norm.isfinite()).float())
        self._optimizer.update([parameter], self._bad)
        parameter.grad = None


def make_updates(
    optimizer: Optimizer, clip: Clip, *, in_backward: bool, stages: "DeviceMesh | None" = None
) -> Updates:
    """The updates of a run; ``stages`` as for `AfterBackward`."""
    if in_backward:
        return InBackward(optimizer, clip)
    return AfterBackward(optimizer, clip, stages)
