"""Loss on held-out rows: the same ones each time, as a plain mean over their tokens."""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch

from torchtitan.batch import Batch
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.data.loader import Loader
from torchtitan.parallel.fsdp import reshard
from torchtitan.training.engine import Engine
from torchtitan.training.feed import to_microbatches


class LoaderOpener(Protocol):
    """Opens a loader for this data rank, with the run's tokenizer and batch shape."""

    def __call__(self, config: Loader.Config) -> Loader:
        """Open ``config`` at its first row."""
        ...


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

        def build(
            self, *, engine: Engine, open_loader: LoaderOpener, micro_batch_rows: int
        ) -> "Validation":
            """Make the evaluation of ``engine``'s model; ``open_loader`` opens `data` from its first row."""
            return Validation(self, engine, open_loader, micro_batch_rows)

    def __init__(
        self, config: Config, engine: Engine, open_loader: LoaderOpener, micro_batch_rows: int
    ) -> None:
        self.config = config
        self.engine = engine
        self._open_loader = open_loader
        self._micro_batch_rows = micro_batch_rows

    def due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after optimizer step number ``step`` (counted from 1)."""
        every = self.config.every_n_steps
        return last or (every > 0 and step % every == 0)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Evaluate: ``validation_loss`` (nats per token), ``validation_perplexity`` and the objective's own means.

        Raises:
            DataError: if the data set has less than one global batch.
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

    def _batches(self) -> Iterator[list[Batch]]:
        with closing(self._open_loader(self.config.data)) as loader:
            for _ in range(self.config.steps):
                batch = loader.next().batch
                yield to_microbatches(batch, self._micro_batch_rows, self.engine.mesh.device)
