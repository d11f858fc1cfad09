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
        warmup_fraction: float | None = None
        """The same as a share of the whole schedule, 0..1, rounded up to a step; None where `warmup_steps` says it."""
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
            fraction = self.warmup_fraction
            if fraction is not None and not 0 <= fraction <= 1:
                yield Problem("warmup_fraction", fraction, "is not in [0, 1]", "set such as 0.03")
            if fraction is not None and self.warmup_steps:
                yield Problem(
                    "warmup_fraction",
                    fraction,
                    f"and warmup_steps={self.warmup_steps} both say how long the rise is",
                    "set warmup_fraction=None or warmup_steps=0",
                )
            if not 0 <= self.min_factor <= 1:
                yield Problem("min_factor", self.min_factor, "is not in [0, 1]", "set such as 0.1")

        def check_lengths(self, training_steps: int | None) -> Iterator[Problem]:
            """Yield a problem if the phases do not fit into the schedule; None for a run of a length not known yet."""
            total = training_steps if self.steps is None else self.steps
            if total is None:
                return
            warmup, decay = self.resolved_warmup_steps(total), self.decay_steps or 0
            if warmup + decay > total:
                yield Problem(
                    "warmup_steps",
                    warmup,
                    f"plus decay_steps={decay} is more than the schedule's {total} steps",
                    f"make them sum to at most {total}, or set schedule.steps",
                )

        def resolved_warmup_steps(self, total: int) -> int:
            """Steps of the rise in a schedule of ``total`` steps."""
            if self.warmup_fraction is None:
                return self.warmup_steps
            return math.ceil(self.warmup_fraction * total - 1e-6)

        def build(self, training_steps: int) -> "Schedule":
            """Make the schedule of a run of ``training_steps``."""
            return Schedule(self, training_steps)

    def __init__(self, config: Config, training_steps: int) -> None:
        self.config = config
        self.total = training_steps if config.steps is None else config.steps
        self.warmup_steps = config.resolved_warmup_steps(self.total)
        remaining = self.total - self.warmup_steps
        self.decay_steps = remaining if config.decay_steps is None else config.decay_steps

    def factor(self, step: int) -> float:
        """Factor on the peak rate at optimizer step ``step``, counted from 0."""
        config = self.config
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
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
