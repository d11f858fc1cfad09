"""Qwen3: debug sizes that train anywhere, dense and with experts, and pretraining of the public sizes."""

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.trainer import Trainer
from torchtitan_recipes.pretraining import on_c4, on_python_text


def qwen3_debugmodel() -> Trainer.Config:
    """A 4M-parameter Qwen3 on the text of the running Python: no download, minutes on a CPU."""
    return on_python_text(qwen3("debug"))


def qwen3_debugmodel_moe() -> Trainer.Config:
    """A Qwen3 with 16 experts, 12M parameters of which a token uses 5M, on the text of the running Python."""
    return on_python_text(qwen3("debug_moe"))


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


def _pretraining(size: str, *, lr: float, global_batch_rows: int) -> Trainer.Config:
    name = f"Qwen/Qwen3-{size.upper().replace('_', '-')}"
    tokenizer = Tokenizer.Config(path=name, eos_token="<|endoftext|>")
    return on_c4(qwen3(size), tokenizer, lr=lr, seq_len=4096, global_batch_rows=global_batch_rows)
