"""Mistral: a debug size that trains anywhere."""

from torchtitan.models.mistral.sizes import mistral
from torchtitan.trainer import Trainer
from torchtitan_recipes.pretraining import on_python_text


def mistral_debugmodel() -> Trainer.Config:
    """A 4M-parameter Mistral, whose attention is windowed, on the text of the running Python: no download, minutes on a CPU."""
    return on_python_text(mistral("debug"))
