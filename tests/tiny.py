"""A run small enough for tests: a Llama of 30,000 parameters on the embedded text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchtitan.batch import IGNORE_INDEX, Batch
from torchtitan.checkpoint import Checkpointer
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training


def tiny_model(**changes) -> Decoder.Config:
    return Decoder.Config(
        **{
            "vocab_size": 4096,
            "dim": 16,
            "n_layers": 2,
            "attention": GQA.Config(n_heads=2, n_kv_heads=1),
            "feed_forward": SwiGLU.Config(ffn_dim=24),
            **changes,
        }
    )


def tiny(folder: Path | str, *, steps: int = 4, **training) -> Trainer.Config:
    config = Trainer.Config(
        model=tiny_model(),
        data=Loader.Config(sources=[Embedded.Config()], n_workers=0),
        optimizer=AdamW.Config(lr=1e-2),
        schedule=Schedule.Config(steps=20, warmup_steps=2),
        training=Training.Config(
            **{"steps": steps, "seq_len": 32, "global_batch_rows": 8, "device": "cpu", **training}
        ),
        checkpoint=Checkpointer.Config(every_n_steps=0),
        folder=str(folder),
    )
    config.metrics.plots.enabled = False
    config.metrics.console.style = "lines"
    return config


@contextmanager
def running(config: Trainer.Config) -> Iterator[Trainer]:
    """A trainer that is closed in any case."""
    trainer = config.build()
    try:
        yield trainer
    finally:
        trainer.close()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, as a copy."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: full(p) for n, p in trainer.models["policy"].model.named_parameters()}


def train(config: Trainer.Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train to the end; the loss of each step and the final weights."""
    losses = []
    with running(config) as trainer:
        step = trainer.train_step

        def recording(microbatches):
            metrics = step(microbatches)
            losses.append(metrics.loss.item())
            return metrics

        trainer.train_step = recording
        trainer.train()
        return losses, weights(trainer)


def rows(n_rows: int, seq_len: int, vocab_size: int, seed: int = 0) -> Batch:
    """Random packed rows whose documents and numbers of labels differ from row to row."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (n_rows, seq_len), generator=g)
    starts = torch.rand(n_rows, seq_len, generator=g) < torch.linspace(0.02, 0.3, n_rows)[:, None]
    starts[:, 0] = True
    document_ids = starts.cumsum(1) - 1
    arange = torch.arange(seq_len).expand(n_rows, seq_len)
    positions = arange - torch.where(starts, arange, 0).cummax(1).values
    labels = tokens.roll(-1, 1)
    labels[starts.roll(-1, 1)] = IGNORE_INDEX  # the last token of each document, and of each row
    labels[torch.rand(n_rows, seq_len, generator=g) < torch.linspace(0, 0.9, n_rows)[:, None]] = (
        IGNORE_INDEX
    )
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": positions,
        "document_ids": document_ids,
    }
