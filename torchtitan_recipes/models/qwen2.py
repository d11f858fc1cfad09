"""Qwen2.5: a debug size that trains anywhere."""

from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.models.qwen2.sizes import qwen2
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training
from torchtitan.training.validation import Validation


def qwen2_debugmodel() -> Trainer.Config:
    """A 4M-parameter Qwen2.5 on the text of the running Python: no download, minutes on a CPU."""
    return Trainer.Config(
        model=qwen2("debug"),
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=3e-3),
        schedule=Schedule.Config(steps=280, warmup_steps=20, decay_steps=180, min_factor=0.1),
        training=Training.Config(steps=280, seq_len=128, global_batch_rows=16),
        validation=Validation.Config(
            every_n_steps=70,
            data=Loader.Config(
                sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0
            ),
        ),
    )
