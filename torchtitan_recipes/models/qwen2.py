"""Qwen2.5: a debug size that trains anywhere."""

from torchtitan.models.qwen2.sizes import qwen2
from torchtitan.trainer import Trainer
from torchtitan_recipes.pretraining import on_python_text


def qwen2_debugmodel() -> Trainer.Config:
    """A 4M-parameter Qwen2.5 on the text of the running Python: no download, minutes on a CPU."""
    return on_python_text(qwen2("debug"))
