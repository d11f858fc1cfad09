"""What pretraining recipes of all families share: data, batch, schedule and validation around a model."""

from torchtitan.checkpoint import Checkpointer
from torchtitan.data.embedded import Embedded
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.loader import Loader
from torchtitan.data.source import Source
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.model import Model
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training
from torchtitan.training.validation import Validation


def on_python_text(model: Model.Config) -> Trainer.Config:
    """A small model on the text of the running Python: no download, minutes on a CPU."""
    return Trainer.Config(
        model=model,
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=3e-3),
        # Its own length, so that a finished run can be continued with more steps: they run at the minimum.
        schedule=Schedule.Config(steps=280, warmup_steps=20, decay_steps=180, min_factor=0.1),
        training=Training.Config(steps=280, seq_len=128, global_batch_rows=16),
        validation=_held_out(Embedded.Config(split="validation"), every_n_steps=70),
    )


def on_c4(
    model: Model.Config,
    tokenizer: Tokenizer.Config,
    *,
    lr: float,
    seq_len: int,
    global_batch_rows: int,
    steps: int = 1000,
) -> Trainer.Config:
    """Rows of C4, one at a time on each GPU; a fifth of the steps is warm-up, as in public recipes."""
    train, held_out = (
        HuggingFace.Config(name="allenai/c4", subset="en", split=split, streaming=True)
        for split in ("train", "validation")
    )
    return Trainer.Config(
        model=model,
        tokenizer=tokenizer,
        data=Loader.Config(sources=[train], n_workers=2),
        optimizer=AdamW.Config(lr=lr),
        schedule=Schedule.Config(warmup_steps=steps // 5, min_factor=0.1),
        training=Training.Config(
            steps=steps, seq_len=seq_len, global_batch_rows=global_batch_rows, micro_batch_rows=1
        ),
        validation=_held_out(held_out, every_n_steps=500),
        checkpoint=Checkpointer.Config(every_n_steps=500, async_save=True),
    )


def _held_out(source: Source.Config, *, every_n_steps: int) -> Validation.Config:
    loader = Loader.Config(sources=[source], shuffle=False, n_workers=0)
    return Validation.Config(every_n_steps=every_n_steps, data=loader)
