"""Next-token prediction: pretraining, and fine-tuning with masked labels."""

# Shapes: B batch, S sequence, D dim.

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from torchtitan.batch import IGNORE_INDEX, Batch
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.head import Head
from torchtitan.objectives.objective import Context, Objective, Sums


class NextToken(Objective):
    """Mean cross-entropy of the labels that count, over all tokens of the global batch."""

    loss_weights = {"next_token": 1.0}  # noqa: RUF012 - read-only by the base's annotation

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `NextToken`."""

        z_loss: float = 0.0
        """Weight of the squared logarithm of the softmax's normaliser, part of the loss; 1e-4 is usual, 0 for none."""
        label_smoothing: float = 0.0
        """Part of the target that is spread evenly over the vocabulary, at least 0 and below 1."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.z_loss < 0:
                yield Problem("z_loss", self.z_loss, "is negative", "set 0 for none")
            if not 0 <= self.label_smoothing < 1:
                yield Problem(
                    "label_smoothing",
                    self.label_smoothing,
                    "is not at least 0 and below 1",
                    "set 0 for none",
                )

        def build(self) -> "NextToken":
            """Make the objective."""
            return NextToken(self)

    def __init__(self, config: Config) -> None:
        self.config = config

    def normalizers(self, batch: Batch) -> dict[str, Tensor]:
        """Number of labels that count."""
        return {"next_token": (batch["labels"] != IGNORE_INDEX).sum()}

    def loss(self, hidden_states: Tensor, head: Head, batch: Batch, context: Context) -> Sums:
        """See `Objective.loss`."""
        del context
        loss = head(
            hidden_states,
            batch["labels"],
            z_loss=self.config.z_loss,
            label_smoothing=self.config.label_smoothing,
        )
        return Sums(losses={"next_token": loss})
