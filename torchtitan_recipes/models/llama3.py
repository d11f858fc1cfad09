"""Llama 3: a debug size that trains anywhere, and pretraining of the public sizes."""

from torchtitan.checkpoint import Checkpointer
from torchtitan.data.embedded import Embedded
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.llama3.sizes import llama3
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.parallel.compile import Compile
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training
from torchtitan.training.validation import Validation

HUB_NAMES = {
    "1b": "Llama-3.2-1B",
    "3b": "Llama-3.2-3B",
    "8b": "Llama-3.1-8B",
    "70b": "Llama-3.1-70B",
    "405b": "Llama-3.1-405B",
}


def llama3_debugmodel() -> Trainer.Config:
    """A 5M-parameter Llama 3 on the text of the running Python: no download, minutes on a CPU."""
    return Trainer.Config(
        model=llama3("debug"),
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=3e-3),
        # Its own length, so that a finished run can be continued with more steps: they run at the minimum.
        schedule=Schedule.Config(steps=280, warmup_steps=20, decay_steps=180, min_factor=0.1),
        training=Training.Config(steps=280, seq_len=128, global_batch_rows=16),
        parallelism=Mesh.Config(reshard_after_forward=False),  # small enough to stay gathered
        validation=Validation.Config(
            every_n_steps=70,
            data=Loader.Config(
                sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0
            ),
        ),
    )


def llama3_1b() -> Trainer.Config:
    """Pretraining of the 1B size of Llama 3.2 on C4."""
    return _pretraining("1b", lr=5e-4, global_batch_rows=64)


def llama3_3b() -> Trainer.Config:
    """Pretraining of the 3B size of Llama 3.2 on C4."""
    return _pretraining("3b", lr=4e-4, global_batch_rows=64)


def llama3_8b() -> Trainer.Config:
    """Pretraining of the 8B size of Llama 3.1 on C4: eight GPUs of 80 GB or more, sharded (FSDP)."""
    config = _pretraining("8b", lr=3e-4, global_batch_rows=128)
    config.activation_checkpointing.mode = "selective"
    return config


def llama3_8b_long_context() -> Trainer.Config:
    """Pretraining of the 8B size of Llama 3.1 on rows of 131,072 tokens: eight GPUs share each row."""
    config = _pretraining("8b", lr=3e-4, global_batch_rows=8)
    config.training.seq_len = 131_072
    config.parallelism.cp = 8
    config.parallelism.context.kind = "ring"
    config.activation_checkpointing.mode = "full"
    return config


def llama3_70b() -> Trainer.Config:
    """Pretraining of the 70B size of Llama 3.1 on C4: nodes of eight GPUs, tensor parallel inside a node, FSDP across."""
    config = _pretraining("70b", lr=1.5e-4, global_batch_rows=256)
    config.parallelism.tp = 8
    config.activation_checkpointing.mode = "full"
    return config


def llama3_405b() -> Trainer.Config:
    """Pretraining of the 405B size of Llama 3.1 on C4: 128 GPUs or more, by tensor, pipeline and FSDP.

    A pipeline of 8 nodes, each with the tensor parallel of its GPUs; what is left is FSDP.
    """
    config = _pretraining("405b", lr=8e-5, global_batch_rows=512, steps=3000)
    config.parallelism.tp = 8
    config.parallelism.pp = 8
    config.parallelism.pipeline = Pipeline.Config(schedule="Interleaved1F1B", stages_per_rank=2)
    config.activation_checkpointing.mode = "full"
    return config


def _pretraining(
    size: str, *, lr: float, global_batch_rows: int, steps: int = 1000
) -> Trainer.Config:
    """Rows of 8,192 tokens, one at a time on each GPU; a fifth of the steps is warm-up, as in public recipes."""
    c4 = HuggingFace.Config(name="allenai/c4", subset="en", streaming=True)
    held_out = HuggingFace.Config(
        name="allenai/c4", subset="en", split="validation", streaming=True
    )
    return Trainer.Config(
        model=llama3(size),
        tokenizer=Tokenizer.Config(path=f"meta-llama/{HUB_NAMES[size]}"),
        data=Loader.Config(sources=[c4], n_workers=2),
        optimizer=AdamW.Config(lr=lr),
        schedule=Schedule.Config(warmup_steps=steps // 5, min_factor=0.1),
        training=Training.Config(
            steps=steps, seq_len=8192, global_batch_rows=global_batch_rows, micro_batch_rows=1
        ),
        compile=Compile.Config(enabled=True),
        validation=Validation.Config(
            every_n_steps=500, data=Loader.Config(sources=[held_out], shuffle=False, n_workers=0)
        ),
        checkpoint=Checkpointer.Config(every_n_steps=500, async_save=True),
    )
