"""Loss on held-out rows: the same ones each time, as a plain mean over their tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchtitan.batch import Batch
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.data.loader import Loader
from torchtitan.parallel.fsdp import reshard
from torchtitan.training.engine import Engine
from torchtitan.training.feed import to_microbatches


class Validation(Configurable):
    """Evaluates the objective on the first ``steps`` global batches of a data set, always the same rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Validation`."""

        OPERATIONAL = frozenset({"every_n_steps", "steps", "data"})

        every_n_steps: int = 100
        """Optimizer steps between evaluations; there is one after the last step too. 0 means only that one."""
        steps: int = 4
        """Global batches of an evaluation, each as large as a training step's."""
        data: Loader.Config
        """Held-out rows, in a fixed order (shuffle off)."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
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

    def due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after optimizer step number ``step`` (counted from 1)."""
        every = self.config.every_n_steps
        return last or (every > 0 and step % every == 0)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Evaluate: ``validation_loss`` (nats per token), ``validation_perplexity`` and the objective's own means.

        Raises:
            DataError: if the data cannot be read.
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
        for _ in range(self.config.steps):
            batch = self.loader.next().batch
            yield to_microbatches(batch, self._micro_batch_rows, self.engine.mesh)
