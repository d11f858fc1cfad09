"""Loss on held-out rows: the same ones each time, as a plain mean over their tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchtitan.batch import Batch
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.data.loader import Loader
from torchtitan.errors import ConfigError
from torchtitan.parallel.fsdp import reshard
from torchtitan.training.engine import Engine
from torchtitan.training.feed import Feed
from torchtitan.training.signals import StopRequest


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run.

    Attributes:
        step: optimizer steps before it.
        value: of the metric.
    """

    step: int
    value: float


class Validation(Configurable):
    """Evaluates the objective on the first ``steps`` global batches of a data set, always the same rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Validation`."""

        OPERATIONAL = frozenset(
            {
                "every_n_steps",
                "at_start",
                "steps",
                "data",
                "metric",
                "mode",
                "keep_best",
                "patience",
            }
        )

        every_n_steps: int = 100
        """Optimizer steps between evaluations; there is one after the last step too. 0 means only that one."""
        at_start: bool = False
        """Evaluate the initial weights too, before the first step: what a fine-tuned model starts from. `keep_best` and
        `patience` do not look at it."""
        steps: int = 4
        """Global batches of an evaluation, each as large as a training step's."""
        data: Loader.Config
        """Held-out rows, in a fixed order (shuffle off)."""

        metric: str = "validation_loss"
        """What `keep_best` and `patience` look at: a metric of the evaluation."""
        mode: Literal["min", "max"] = "min"
        """Whether a lower or a higher value of `metric` is better."""
        keep_best: bool = False
        """Save a checkpoint after each evaluation that is the best so far, and keep the best whatever its age;
        `best.json` in the run folder names it."""
        patience: int | None = None
        """End the run after so many evaluations in a row that are no better than the best; None never ends early."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.patience is not None and self.patience < 1:
                yield Problem(
                    "patience", self.patience, "is not positive", "set 1 or more, or None for never"
                )
            if self.steps < 1:
                yield Problem(
                    "steps", self.steps, "is not positive", "set at least 1, or validation to None"
                )
            if self.every_n_steps < 0:
                yield Problem("every_n_steps", self.every_n_steps, "is negative", "set 0 or more")
            if self.data.shuffle:
                yield Problem(
                    "data.shuffle", True, "would change the rows with the seed", "set it to False"
                )

        def build(self, *, engine: Engine, loader: Loader, micro_batch_rows: int) -> "Validation":
            """Make the evaluation of ``engine``'s model on what ``loader``, made from `data`, yields first."""
            return Validation(self, engine, loader, micro_batch_rows)

    def __init__(
        self, config: Config, engine: Engine, loader: Loader, micro_batch_rows: int
    ) -> None:
        self.config = config
        self.engine = engine
        self.loader = loader
        self._micro_batch_rows = micro_batch_rows
        self.best: Best | None = None
        self.n_without_gain = 0
        """Evaluations since the best one."""

    @property
    def exhausted(self) -> bool:
        """Whether `patience` is at its end."""
        patience = self.config.patience
        return patience is not None and self.n_without_gain >= patience

    def judge(self, step: int, metrics: dict[str, float]) -> bool:
        """Compare an evaluation with the best one before; whether it is the new best.

        Raises:
            ConfigError: if there is no such metric.
        """
        name = self.config.metric
        if name not in metrics:
            raise ConfigError(
                f"validation.metric={name!r} is not among the metrics of the evaluation, {', '.join(metrics)}; set one of them"
            )
        value = metrics[name]
        sign = 1 if self.config.mode == "min" else -1
        if math.isnan(value) or (self.best and sign * value >= sign * self.best.value):
            self.n_without_gain += 1
            return False
        self.best, self.n_without_gain = Best(step, value), 0
        return True

    def state(self) -> dict[str, Any]:
        """The best evaluation so far, for the checkpoint."""
        best = self.best and [self.best.step, self.best.value]
        return {"best": best, "metric": self.config.metric, "n_without_gain": self.n_without_gain}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on judging; a best value of another metric says nothing."""
        if state["metric"] == self.config.metric and state["best"] is not None:
            self.best = Best(*state["best"])
            self.n_without_gain = state["n_without_gain"]

    def due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after optimizer step number ``step`` (counted from 1)."""
        every = self.config.every_n_steps
        return last or (every > 0 and step % every == 0)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Evaluate: ``validation_loss`` (nats per token), ``validation_perplexity`` and the objective's own means.

        Raises:
            DataError: on all ranks, if the data of one of them cannot be read.
        """
        engine = self.engine
        engine.model.eval()
        sums, totals = [], []
        for microbatches in self._batches():
            totals.append(engine.totals(microbatches))
            sums.extend(engine.evaluate(microbatches, totals[-1]))
        whole = {name: torch.stack([t[name] for t in totals]).sum() for name in totals[0]}
        loss = engine.reduce(sums, whole)
        reshard(engine.model)
        engine.model.train()
        value = loss.total.item()  # sync: once an evaluation
        metrics = {f"validation_{name}": mean.item() for name, mean in loss.metrics.items()}
        perplexity = math.exp(value) if value < 700 else math.inf
        return {"validation_loss": value, "validation_perplexity": perplexity, **metrics}

    def close(self) -> None:
        """Stop the loader's workers."""
        self.loader.close()

    def _batches(self) -> Iterator[list[Batch]]:
        self.loader.rewind()
        no_stop = (
            StopRequest()
        )  # an evaluation is finished, the run's own feed hears of a stop after it
        feed = Feed(self.loader, self.engine.mesh, self._micro_batch_rows, no_stop)
        for fed in feed.steps(self.config.steps):
            yield fed.microbatches
