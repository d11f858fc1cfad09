"""Llama 3: a debug size that trains anywhere, and pretraining of the public sizes."""

from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.models.llama3.sizes import llama3
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training
from torchtitan.training.validation import Validation


def llama3_debugmodel() -> Trainer.Config:
    """A 5M-parameter Llama 3 on the text of the running Python: no download, minutes on a CPU."""
    return Trainer.Config(
        model=llama3("debug"),
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=2e-3),
        # Its own length, so that a finished run can be continued with more steps: they run at the minimum.
        schedule=Schedule.Config(steps=200, warmup_steps=20, decay_steps=100, min_factor=0.1),
        training=Training.Config(steps=200, seq_len=256, global_batch_rows=8),
        validation=Validation.Config(
            every_n_steps=50,
            data=Loader.Config(
                sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0
            ),
        ),
    )
