"""Qwen3: debug sizes that train anywhere, dense and with experts, and pretraining of the public sizes."""

from torchtitan.checkpoint import Checkpointer
from torchtitan.data.embedded import Embedded
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training
from torchtitan.training.validation import Validation


def qwen3_debugmodel() -> Trainer.Config:
    """A 4M-parameter Qwen3 on the text of the running Python: no download, minutes on a CPU."""
    return _debug("debug")


def qwen3_debugmodel_moe() -> Trainer.Config:
    """A Qwen3 with 16 experts, 12M parameters of which a token uses 5M, on the text of the running Python."""
    return _debug("debug_moe")


def qwen3_0_6b() -> Trainer.Config:
    """Pretraining of Qwen3-0.6B on C4."""
    return _pretraining("0.6b", lr=8e-4, global_batch_rows=128)


def qwen3_1_7b() -> Trainer.Config:
    """Pretraining of Qwen3-1.7B on C4."""
    return _pretraining("1.7b", lr=6e-4, global_batch_rows=128)


def qwen3_4b() -> Trainer.Config:
    """Pretraining of Qwen3-4B on C4."""
    return _pretraining("4b", lr=5e-4, global_batch_rows=256)


def qwen3_8b() -> Trainer.Config:
    """Pretraining of Qwen3-8B on C4."""
    return _pretraining("8b", lr=4e-4, global_batch_rows=256)


def qwen3_14b() -> Trainer.Config:
    """Pretraining of Qwen3-14B on C4."""
    return _pretraining("14b", lr=3e-4, global_batch_rows=512)


def qwen3_32b() -> Trainer.Config:
    """Pretraining of Qwen3-32B on C4."""
    return _pretraining("32b", lr=2e-4, global_batch_rows=512)


def qwen3_30b_a3b() -> Trainer.Config:
    """Pretraining of Qwen3-30B-A3B on C4: eight ranks share the 128 experts of a layer."""
    config = _pretraining("30b_a3b", lr=4e-4, global_batch_rows=512)
    config.parallelism.ep = 8
    config.activation_checkpointing.mode = "full"
    return config


def qwen3_235b_a22b() -> Trainer.Config:
    """Pretraining of Qwen3-235B-A22B on C4: eight ranks share the 128 experts of a layer."""
    config = _pretraining("235b_a22b", lr=2e-4, global_batch_rows=1024)
    config.parallelism.ep = 8
    config.activation_checkpointing.mode = "full"
    return config


def _debug(size: str) -> Trainer.Config:
    return Trainer.Config(
        model=qwen3(size),
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=3e-3),
        # Its own length, so that a finished run can be continued with more steps: they run at the minimum.
        schedule=Schedule.Config(steps=280, warmup_steps=20, decay_steps=180, min_factor=0.1),
        training=Training.Config(steps=280, seq_len=128, global_batch_rows=16),
        validation=Validation.Config(
            every_n_steps=70,
            data=Loader.Config(
                sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0
            ),
        ),
    )


def _pretraining(
    size: str, *, lr: float, global_batch_rows: int, steps: int = 1000
) -> Trainer.Config:
    """Rows of 4,096 tokens, one at a time on each GPU; a fifth of the steps is warm-up, as in public recipes."""
    c4 = HuggingFace.Config(name="allenai/c4", subset="en", streaming=True)
    held_out = HuggingFace.Config(
        name="allenai/c4", subset="en", split="validation", streaming=True
    )
    hub_name = f"Qwen/Qwen3-{size.upper().replace('_', '-')}"
    return Trainer.Config(
        model=qwen3(size),
        tokenizer=Tokenizer.Config(path=hub_name, eos_token="<|endoftext|>"),
        data=Loader.Config(sources=[c4], n_workers=2),
        optimizer=AdamW.Config(lr=lr),
        schedule=Schedule.Config(warmup_steps=steps // 5, min_factor=0.1),
        training=Training.Config(
            steps=steps, seq_len=4096, global_batch_rows=global_batch_rows, micro_batch_rows=1
        ),
        validation=Validation.Config(
            every_n_steps=500, data=Loader.Config(sources=[held_out], shuffle=False, n_workers=0)
        ),
        checkpoint=Checkpointer.Config(every_n_steps=500, async_save=True),
    )
