"""Learning-rate schedules: pure functions of the step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan.config.configurable import Configurable, Problem


class Schedule(Configurable):
    """Warm-up, stable, decay (arXiv:2404.06395, figure 1), as a factor on the peak rate.

    With ``t`` counted from 0, ``W`` warm-up steps, ``D`` decay steps and ``N`` steps in all: the factor is
    ``(t + 1) / W`` for ``t < W`` (so the first step already moves), 1 until ``N - D``, and then falls so that step
    ``N - 1`` has `min_factor`, which also holds after it. Every length may be 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Schedule`."""

        warmup_steps: int = 0
        """Steps of linear rise to the peak, in optimizer steps."""
        decay_steps: int | None = None
        """Steps of fall at the end; None means all after the warm-up, 0 means none."""
        decay: Literal["linear", "cosine", "sqrt"] = "linear"
        """Shape of the fall; `sqrt` is 1 - sqrt(progress)."""
        min_factor: float = 0.0
        """Factor on the peak rate at the last step and after it."""
        steps: int | None = None
        """Length of the whole schedule, in optimizer steps; None means training.steps. A run that is to be continued with
        more steps later sets it, since it decides the rate of every step of the fall."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("warmup_steps", "decay_steps", "steps"):
                value = getattr(self, name)
                if value is not None and value < 0:
                    yield Problem(name, value, "is negative", "set 0 or more")
            if not 0 <= self.min_factor <= 1:
                yield Problem("min_factor", self.min_factor, "is not in [0, 1]", "set such as 0.1")

        def check_lengths(self, training_steps: int) -> Iterator[Problem]:
            """Yield a problem if the phases do not fit into the schedule."""
            total = training_steps if self.steps is None else self.steps
            decay = self.decay_steps or 0
            if self.warmup_steps + decay > total:
                yield Problem(
                    "warmup_steps",
                    self.warmup_steps,
                    f"plus decay_steps={decay} is more than the schedule's {total} steps",
                    f"make them sum to at most {total}, or set schedule.steps",
                )

        def build(self, training_steps: int) -> "Schedule":
            """Make the schedule of a run of ``training_steps``."""
            return Schedule(self, training_steps)

    def __init__(self, config: Config, training_steps: int) -> None:
        self.config = config
        self.total = training_steps if config.steps is None else config.steps
        remaining = self.total - config.warmup_steps
        self.decay_steps = remaining if config.decay_steps is None else config.decay_steps

    def factor(self, step: int) -> float:
        """Factor on the peak rate at optimizer step ``step``, counted from 0."""
        config = self.config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if self.decay_steps == 0:
            return 1.0
        progress = (step - (self.total - self.decay_steps) + 1) / self.decay_steps
        if progress <= 0:
            return 1.0
        if progress >= 1:
            return config.min_factor
        if config.decay == "linear":
            height = 1 - progress
        elif config.decay == "cosine":
            height = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            height = 1 - math.sqrt(progress)
        return config.min_factor + (1 - config.min_factor) * height
