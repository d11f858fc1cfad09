"""Forward and backward of one optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.batch import Batch
from torchtitan.errors import NumericsError
from torchtitan.models.model import Model
from torchtitan.objectives.objective import Context, Objective, Sums
from torchtitan.parallel.fsdp import set_gradient_sync
from torchtitan.parallel.mesh import Mesh
from torchtitan.training.participants import Participants


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Loss of a whole step, the same on every rank; tensors on the device.

    Attributes:
        total: the weighted sum of the losses, each over its global count.
        metrics: named global means: each loss on its own if there are several, and the objective's metrics.
        nonfinite_by_rank: ``(world_size,)``, 1 where that rank's own loss was not finite.
    """

    total: Tensor
    metrics: dict[str, Tensor]
    nonfinite_by_rank: Tensor


class Engine:
    """Runs micro-batches through a model and its objective; how a step is cut shows nowhere else.

    Args:
        model: the parallelized model.
        objective: what a batch costs.
        mesh: of the run.
        refuse_bad_loss: let all ranks wait for each other's loss, and end the run before the backward if one is not
            finite. For parameters that are updated in the backward.
    """

    def __init__(
        self, model: Model, objective: Objective, mesh: Mesh, *, refuse_bad_loss: bool = False
    ) -> None:
        self._refuse_bad_loss = refuse_bad_loss
        self._step_number = 0
        self.model = model
        self.objective = objective
        self.mesh = mesh
        self.participants = Participants(model, mesh)
        self._zero = torch.zeros((), device=mesh.device)

    def totals(self, microbatches: Sequence[Batch]) -> dict[str, Tensor]:
        """The objective's normalizers over all micro-batches and data ranks; 0 where there is nothing to learn."""
        counts = [self.objective.normalizers(batch) for batch in microbatches]
        names = list(counts[0])
        local = torch.stack([torch.stack([c[name] for c in counts]).sum() for name in names])
        summed = self.mesh.sum_over_data(local.double())
        return dict(zip(names, summed.float().unbind(), strict=True))

    def forward_backward(
        self, microbatches: Sequence[Batch], totals: dict[str, Tensor], step: int = 0
    ) -> StepLoss:
        """Add the gradients of the step's total loss to the parameters; they are complete when this returns.

        Args:
            microbatches: of the step, on this rank.
            totals: from `totals`.
            step: its number, for the text of an error.

        Raises:
            NumericsError: with ``refuse_bad_loss``, on all ranks, if the loss of one is not finite.
        """
        self._step_number = step
        context = Context(totals=divisors(totals))
        self.participants.before_step(context.totals[self.objective.main_loss])
        return self.reduce(self.accumulate(microbatches, context), totals)

    def accumulate(self, microbatches: Sequence[Batch], context: Context) -> Sequence[Sums]:
        """Forward and backward of each micro-batch, and its sums."""
        sums: list[Sums] = []
        for i, batch in enumerate(microbatches):
            set_gradient_sync(self.model, last_microbatch=i == len(microbatches) - 1)
            micro = self.forward(batch, context)
            loss = self.weigh(micro, context.totals)
            if self._refuse_bad_loss:
                self._check_finite(loss.detach())
            loss.backward()
            sums.append(micro)
        return sums

    def evaluate(self, microbatches: Sequence[Batch], totals: dict[str, Tensor]) -> Sequence[Sums]:
        """The objective's sums of each micro-batch, without gradients; for `reduce`."""
        context = Context(totals=divisors(totals))
        return [self.forward(batch, context) for batch in microbatches]

    def forward(self, batch: Batch, context: Context) -> Sums:
        """The objective's sums of one micro-batch."""
        hidden_states = self.model(*(batch[name] for name in self.model.batch_fields))
        return self.objective.loss(hidden_states, self.model.head, batch, context)

    def weigh(self, sums: Sums, totals: Mapping[str, Tensor]) -> Tensor:
        """This micro-batch's part of the step's total loss."""
        weights = self.objective.loss_weights
        parts = [weights[name] * loss / totals[name] for name, loss in sums.losses.items()]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def reduce(self, sums: Sequence[Sums], totals: dict[str, Tensor]) -> StepLoss:
        """Add up micro-batches and data ranks: one all-reduce for all that the step reports."""
        totals = divisors(totals)
        losses = {name: self._add([s.losses[name] for s in sums]) for name in totals}
        pairs = {
            name: [self._add([s.metrics[name][side] for s in sums]) for side in (0, 1)]
            for name in self.metric_names(sums)
        }
        flags = torch.zeros(self.mesh.world_size, dtype=torch.float64, device=self.mesh.device)
        local = torch.stack(list(losses.values())).double()
        flags[self.mesh.rank] = (~local.isfinite()).any().double()
        flat = [local, *(torch.stack(pair).double() for pair in pairs.values()), flags]
        everywhere = self.sum_everywhere(torch.cat(flat))
        loss_sums, rest = everywhere[: len(losses)], everywhere[len(losses) :]
        means = {
            name: loss / totals[name].double() for name, loss in zip(losses, loss_sums, strict=True)
        }
        total = torch.stack(
            [self.objective.loss_weights[n] * mean for n, mean in means.items()]
        ).sum()
        metrics = means if len(means) > 1 else {}
        for i, name in enumerate(pairs):
            metrics = {**metrics, name: rest[2 * i] / rest[2 * i + 1].clamp(min=1)}
        return StepLoss(total=total, metrics=metrics, nonfinite_by_rank=rest[2 * len(pairs) :])

    def metric_names(self, sums: Sequence[Sums]) -> Sequence[str]:
        """Names of the objective's metrics, the same on every rank."""
        return list(sums[0].metrics)

    def sum_everywhere(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` up over the ranks that have losses of their own, in place; all ranks get the result."""
        return self.mesh.sum_over_data(tensor)

    def _check_finite(self, loss: Tensor) -> None:
        """Meet the other ranks and compare.

        Raises:
            NumericsError: on all ranks, if the loss of one is not finite.
        """
        flags = torch.zeros(self.mesh.world_size, dtype=torch.float64, device=loss.device)
        flags[self.mesh.rank] = (~loss.isfinite()).double()
        by_rank = self.sum_everywhere(
            flags
        ).tolist()  # sync: the one of a step with updates in the backward
        bad = [str(rank) for rank, flag in enumerate(by_rank) if flag]
        if bad:
            raise NumericsError(
                f"step {self._step_number}: the loss of rank {', '.join(bad)} was not finite. No weight was changed, since it was found before the "
                "backward; resume from the last checkpoint with a lower optimizer.lr, or look at the data of that step"
            )

    def _add(self, values: Sequence[Tensor]) -> Tensor:
        """Their sum; 0 if there are none."""
        return torch.stack(list(values)).sum() if values else self._zero


def divisors(totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``totals`` as losses are divided by them: at least 1, so that one of nothing is 0."""
    return {name: total.clamp(min=1) for name, total in totals.items()}
