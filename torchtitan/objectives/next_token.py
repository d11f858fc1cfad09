"""Next-token prediction: pretraining, and fine-tuning with masked labels."""

# Shapes: B batch, S sequence, D dim.

from dataclasses import dataclass

from torch import Tensor

from torchtitan.batch import IGNORE_INDEX, Batch
from torchtitan.config.configurable import Configurable
from torchtitan.models.layers.head import Head
from torchtitan.objectives.objective import Context, Objective, Sums


class NextToken(Objective):
    """Mean cross-entropy of the labels that count, over all tokens of the global batch."""

    loss_weights = {"next_token": 1.0}  # noqa: RUF012 - read-only by the base's annotation

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """`NextToken` has no settings."""

        def build(self) -> "NextToken":
            """Make the objective."""
            return NextToken()

    def normalizers(self, batch: Batch) -> dict[str, Tensor]:
        """Number of labels that count."""
        return {"next_token": (batch["labels"] != IGNORE_INDEX).sum()}

    def loss(self, hidden_states: Tensor, head: Head, batch: Batch, context: Context) -> Sums:
        """See `Objective.loss`."""
        del context
        return Sums(losses={"next_token": head(hidden_states, batch["labels"])})
