"""No weight is changed by a loss or gradient that is not finite, no step without a token passes in silence, and none waits for it."""

import logging

import torch
from torch import Tensor

from torchtitan.errors import DataError, NumericsError

log = logging.getLogger(__name__)


class Guard:
    """Decides on the device whether a step may update, and tells the host one step late.

    Once a step was bad, every later update is masked too, so the weights that the run ends with are those from
    before the bad step.

    Args:
        device: where losses and gradient norms live.
        world_size: number of ranks.
        in_backward: whether parameters are updated in the backward, where a bad gradient masks its own update alone.
        most_empty: steps in a row without a token to learn from that end the run: an epoch of them, or all; None for
            no limit.
    """

    def __init__(
        self,
        device: torch.device,
        world_size: int,
        *,
        in_backward: bool = False,
        most_empty: int | None = None,
    ) -> None:
        self._in_backward, self._most_empty = in_backward, most_empty
        self.empty_steps = 0
        """Steps so far that had no token to learn from, but for the last one."""
        self._empty = torch.zeros(2, dtype=torch.float64, device=device)
        """Those of this process, and those in a row up to now."""
        self._bad = torch.zeros((), dtype=torch.float32, device=device)
        self._report = torch.zeros(3 + world_size, dtype=torch.float64, device=device)
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    @property
    def bad(self) -> Tensor:
        """Scalar float32: 1 once a step was bad, else 0."""
        return self._bad

    def update(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        nonfinite_by_rank: Tensor,
        learned: Tensor,
    ) -> Tensor:
        """Take in a step's numbers, the same on every rank; return the mask for `Optimizer.step`.

        Args:
            step: number of the step, for the report.
            loss: global loss, scalar.
            grad_norm: global gradient norm, scalar.
            nonfinite_by_rank: ``(world_size,)``, 1 where that rank's own loss was not finite.
            learned: global count that the loss was divided by, scalar; 0 if there was nothing to learn.

        Returns:
            Scalar float32: 1 if this step or an earlier one was bad, else 0.
        """
        now = torch.stack((loss.double(), grad_norm.double()))
        bad_now = (~now.isfinite()).any()
        report = torch.cat((now.new_tensor([step]), now, nonfinite_by_rank.double()))
        first_bad = bad_now & (self._bad == 0)
        self._report = torch.where(first_bad, report, self._report)
        self._bad = torch.maximum(self._bad, bad_now.float())
        empty = (learned == 0).double()
        self._empty = torch.stack((self._empty[0] + empty, (self._empty[1] + 1) * empty))
        return self._bad

    def start_report(self) -> None:
        """Begin to copy what is known so far to the host; `check` reads it later, without waiting for newer work."""
        both = torch.cat((self._empty, self._bad.double()[None], self._report))
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
            DataError: if too many steps in a row had nothing to learn.
        """
        if self._pending is None:
            return
        host, event = self._pending
        if event is not None:
            event.synchronize()  # sync: for work that was queued a step ago
        self._pending = None
        empty, in_a_row, bad, step, loss, grad_norm, *by_rank = host.tolist()
        self._tell_empty(int(empty), int(in_a_row))
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

    def _tell_empty(self, empty: int, in_a_row: int) -> None:
        """Say it once that a step had nothing to learn, and end the run if that is all there is.

        Raises:
            DataError: on all ranks, at the same step.
        """
        if self._most_empty is not None and in_a_row >= self._most_empty:
            raise DataError(
                f"{in_a_row} steps in a row had no token to learn from, which is "
                "a whole epoch or the whole run: every label is masked, so all losses and gradients are 0; look at what the "
                "data marks as learned (data.learn), and whether samples are cut to training.seq_len before their answers"
            )
        if empty and not self.empty_steps:
            log.warning(
                "a step had no token to learn from (every label is masked): its loss and gradients are 0, and momentum and "
                "weight decay alone move the weights; such steps are counted as the metric empty_steps"
            )
        self.empty_steps = empty
