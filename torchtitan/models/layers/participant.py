"""Modules that take part in a training step besides their forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of a module's, to be joined with those that others have under the same name.

    Attributes:
        value: scalar on the device.
        join: how numbers of the same name become one.
    """

    value: Tensor
    join: Literal["sum", "max", "min"]


@runtime_checkable
class StepParticipant(Protocol):
    """A module with losses, counts or updates of its own; whoever trains finds it by walking the model.

    In a step: ``before_step``, the micro-batches, ``step_sums`` (added up over the ranks with other tokens), the
    optimizer, ``after_update``, ``readings``.
    """

    def before_step(self, normalizer: Tensor) -> None:
        """Begin a step: forget the last one's sums.

        Args:
            normalizer: scalar, the global count that the main loss is divided by; losses of the module's own are too.
        """
        ...

    def step_sums(self) -> Tensor:
        """What the micro-batches of this rank add up to, as a float64 vector of fixed length."""
        ...

    def after_update(self, sums: Tensor, skip: Tensor) -> None:
        """Change what is not the optimizer's.

        Args:
            sums: `step_sums` over all ranks.
            skip: scalar, 1 where the step changed no weight.
        """
        ...

    def readings(self, name: str, sums: Tensor) -> Mapping[str, Reading]:
        """Metrics of the step.

        Args:
            name: of the module in its model.
            sums: `step_sums` over all ranks.
        """
        ...
