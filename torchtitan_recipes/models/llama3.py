"""Llama 3: a debug size that trains anywhere, and pretraining of the public sizes."""

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.llama3.sizes import llama3
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.trainer import Trainer
from torchtitan_recipes.pretraining import on_c4, on_python_text

HUB_NAMES = {
    "1b": "Llama-3.2-1B",
    "3b": "Llama-3.2-3B",
    "8b": "Llama-3.1-8B",
    "70b": "Llama-3.1-70B",
    "405b": "Llama-3.1-405B",
}


def llama3_debugmodel() -> Trainer.Config:
    """A 5M-parameter Llama 3 on the text of the running Python: no download, minutes on a CPU."""
    config = on_python_text(llama3("debug"))
    config.parallelism.reshard_after_forward = False  # small enough to stay gathered
    return config


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
    config = on_c4(
        llama3(size),
        Tokenizer.Config(path=f"meta-llama/{HUB_NAMES[size]}"),
        lr=lr,
        seq_len=8192,
        global_batch_rows=global_batch_rows,
        steps=steps,
    )
    config.compile.enabled = True
    return config
