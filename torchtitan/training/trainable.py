"""A model together with what trains it."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.models.model import Model
from torchtitan.objectives.objective import Objective
from torchtitan.optim.optimizer import Optimizer
from torchtitan.optim.schedule import Schedule
from torchtitan.optim.updates import Updates
from torchtitan.training.engine import Engine


@dataclass(frozen=True, slots=True)
class Trainable:
    """One entry of ``Trainer.models``.

    Attributes:
        model: parallelized; its parameters are this rank's shards.
        objective: what a batch costs.
        optimizer: of the model's parameters.
        updates: when the optimizer moves which parameters.
        schedule: of the optimizer's rate.
        engine: forward and backward of a step.
    """

    model: Model
    objective: Objective
    optimizer: Optimizer
    updates: Updates
    schedule: Schedule
    engine: Engine

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Live tensors of a checkpoint: ``<name>.model.<parameter>`` and ``<name>.optimizer.<parameter>.<state>``."""
        weights = {f"{name}.model.{key}": p for key, p in self.model.named_parameters()}
        buffers = {f"{name}.model.{key}": b for key, b in self.model.named_buffers()}
        state = self.optimizer.state_tensors()
        return {
            **{key: tensor.detach() for key, tensor in {**weights, **buffers}.items()},
            **{f"{name}.optimizer.{key}": tensor for key, tensor in state.items()},
        }
