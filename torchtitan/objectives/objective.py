"""What a batch costs: the seam between the trainer and every training method."""

# Shapes: B batch, S sequence, D dim.

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from torchtitan.batch import Batch
from torchtitan.config.configurable import Configurable
from torchtitan.models.layers.head import Head
from torchtitan.models.model import Model


@dataclass(frozen=True, slots=True)
class Context:
    """All that an objective knows of the step and of parallelism.

    Attributes:
        totals: the `Objective.normalizers` summed over the micro-batches and data ranks of the step; scalars.
    """

    totals: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sums:
    """What one micro-batch adds to the step.

    Attributes:
        losses: name -> sum to be divided by ``Context.totals[name]``; scalars with gradients.
        metrics: name -> (sum, count), both scalars without gradients; logged as the global sum over the global count.
    """

    losses: dict[str, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Objective(Configurable):
    """A training method. Losses are *sums*, divided by one global count per name.

    So the gradient does not depend on how a step is cut into micro-batches and ranks.
    """

    loss_weights: Mapping[str, float]
    """Name of each loss -> its weight in the total."""

    @property
    def main_loss(self) -> str:
        """The loss whose normalizer a module's own losses are divided by too: the first of `loss_weights`."""
        return next(iter(self.loss_weights))

    def prepare(self, batch: Batch, models: Mapping[str, Model]) -> Batch:
        """Return the batch with what the loss needs besides (reference log-probs, advantages); runs without grad."""
        del models
        return batch

    @abstractmethod
    def normalizers(self, batch: Batch) -> dict[str, Tensor]:
        """For each loss, what this batch adds to the count its sum is divided by; scalars on the batch's device."""

    @abstractmethod
    def loss(self, hidden_states: Tensor, head: Head, batch: Batch, context: Context) -> Sums:
        """Loss sums of one micro-batch from the model's ``(B, S, D)`` hidden states."""
