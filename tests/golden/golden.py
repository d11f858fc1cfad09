"""The golden loss series of the debug recipe: how it is made, and what it was made with.

The recipe's embedded text differs between Python versions, so the series is that of the recipe's model, optimizer and
schedule on a text that is written here. Regenerate it only when the mathematics was meant to change, and say why in
the commit:

    python -m tests.golden.golden
"""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan.data import Loader, MapSource, Source
from torchtitan_recipes.models.llama3 import llama3_debugmodel

SERIES = Path(__file__).with_name("llama3_debugmodel.json")
STEPS = 100


class WrittenText(MapSource):
    """Sentences of a small grammar, the same on every machine."""

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        """Settings of `WrittenText`."""

        count: int = 400
        """Number of documents."""

        def build(self) -> "WrittenText":
            """Make the source."""
            return WrittenText(self.count)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> str:
        words = random.Random(index)
        nouns = [
            "tensor",
            "gradient",
            "rank",
            "mesh",
            "token",
            "layer",
            "batch",
            "step",
            "loss",
            "kernel",
        ]
        verbs = ["reduces", "shards", "gathers", "feeds", "masks", "scales", "rotates", "stores"]

        def pick(choices: list[str]) -> str:
            return choices[int(words.random() * len(choices))]  # random() is stable across versions

        return " ".join(
            f"The {pick(nouns)} {pick(verbs)} {int(words.random() * 100)} {pick(nouns)}s."
            for _ in range(5 + int(words.random() * 40))
        )

    def describe(self) -> str:
        return "WrittenText"


def environment() -> dict[str, str | int]:
    """What bit-equality depends on."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
    }


def run(steps: int) -> list[float]:
    """Losses of the first ``steps`` steps, on one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = llama3_debugmodel()
        config.folder = folder
        config.data = Loader.Config(sources=[WrittenText.Config()], n_workers=0)
        config.validation = None
        config.training.steps = steps
        config.training.seq_len = 64
        config.training.global_batch_rows = 4
        config.training.device = "cpu"
        config.metrics.plots.enabled = False
        trainer = config.build()
        losses = []
        step = trainer.train_step

        def recording(microbatches):
            metrics = step(microbatches)
            losses.append(metrics.loss.item())
            return metrics

        trainer.train_step = recording
        trainer.train()
        trainer.close()
    return losses


if __name__ == "__main__":
    losses = run(STEPS)
    SERIES.write_text(
        json.dumps({"environment": environment(), "losses": losses}, indent=1) + "\n", "utf-8"
    )
