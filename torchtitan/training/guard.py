"""No weight is changed by a loss or gradient that is not finite, and no step waits to find out."""

import torch
from torch import Tensor

from torchtitan.errors import NumericsError


class Guard:
    """Decides on the device whether a step may update, and tells the host one step late.

    Once a step was bad, every later update is masked too, so the weights that the run ends with are those from
    before the bad step.

    Args:
        device: where losses and gradient norms live.
        world_size: number of ranks.
        in_backward: whether parameters are updated in the backward, where a bad gradient masks its own update alone.
    """

    def __init__(self, device: torch.device, world_size: int, *, in_backward: bool = False) -> None:
        self._in_backward = in_backward
        self._bad = torch.zeros((), dtype=torch.float32, device=device)
        self._report = torch.zeros(3 + world_size, dtype=torch.float64, device=device)
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    @property
    def bad(self) -> Tensor:
        """Scalar float32: 1 once a step was bad, else 0."""
        return self._bad

    def update(
        self, step: int, loss: Tensor, grad_norm: Tensor, nonfinite_by_rank: Tensor
    ) -> Tensor:
        """Take in a step's numbers, the same on every rank; return the mask for `Optimizer.step`.

        Args:
            step: number of the step, for the report.
            loss: global loss, scalar.
            grad_norm: global gradient norm, scalar.
            nonfinite_by_rank: ``(world_size,)``, 1 where that rank's own loss was not finite.

        Returns:
            Scalar float32: 1 if this step or an earlier one was bad, else 0.
        """
        now = torch.stack((loss.double(), grad_norm.double()))
        bad_now = (~now.isfinite()).any()
        report = torch.cat((now.new_tensor([step]), now, nonfinite_by_rank.double()))
        first_bad = bad_now & (self._bad == 0)
        self._report = torch.where(first_bad, report, self._report)
        self._bad = torch.maximum(self._bad, bad_now.float())
        return self._bad

    def start_report(self) -> None:
        """Begin to copy what is known so far to the host; `check` reads it later, without waiting for newer work."""
        both = torch.cat((self._bad.double()[None], self._report))
        if both.device.type == "cuda":
            host = torch.empty_like(both, device="cpu", pin_memory=True)
            host.copy_(both, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (host, event)
        else:
            self._pending = (both, None)

    def check(self) -> None:
        """Read the last `start_report`.

        Raises:
            NumericsError: if a step was bad; the text names the step, the numbers and the ranks.
        """
        if self._pending is None:
            return
        host, event = self._pending
        if event is not None:
            event.synchronize()  # sync: for work that was queued a step ago
        self._pending = None
        bad, step, loss, grad_norm, *by_rank = host.tolist()
        if not bad:
            return
        ranks = [rank for rank, flag in enumerate(by_rank) if flag]
        origin = (
            f"the loss of rank {', '.join(map(str, ranks))} was not finite"
            if ranks
            else "every rank's loss was finite, so the gradient overflowed in the backward"
        )
        changed = (
            "Weights whose gradients were complete before may have been updated in this step, and nothing was saved from it"
            if self._in_backward
            else "No weight was changed by this step or after it"
        )
        raise NumericsError(
            f"step {step:.0f}: loss={loss:g}, grad_norm={grad_norm:g}; {origin}. {changed}; "
            "resume from the last checkpoint with a lower optimizer.lr or a smaller "
            "training.max_grad_norm, or look at the data of that step"
        )

    def check_now(self) -> None:
        """`start_report` and `check`: before anything is saved. Raises what `check` raises."""
        self.start_report()
        self.check()
