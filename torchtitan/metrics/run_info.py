"""What the metrics know of a run before its first step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """The run as the sinks see it.

    Attributes:
        recipe: name of the recipe.
        config: the resolved config tree as JSON-able data.
        total_steps: the step at which the run ends.
        tokens_per_step_global: tokens of one step over all ranks.
        flops_per_token: floating point operations for one token, forward and backward.
        world_size: number of processes, one device each.
        rank: this process; only rank 0 writes.
        device_type: ``"cpu"`` or ``"cuda"``.
        device_name: as the driver names it (``"NVIDIA H100 80GB HBM3"``).
        compute_dtype: type of the matrix products: ``"float32"``, ``"bfloat16"``, ``"float8"``, ...
        n_params: parameters of the model.
        start_step: steps already done: 0, or the step of the checkpoint that is resumed.
    """

    recipe: str
    config: dict[str, Any]
    total_steps: int
    tokens_per_step_global: int
    flops_per_token: float
    world_size: int
    rank: int
    device_type: str
    device_name: str
    compute_dtype: str
    n_params: int
    start_step: int
