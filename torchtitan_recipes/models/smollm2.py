"""SmolLM2: a debug size that trains anywhere."""

from torchtitan.models.smollm2.sizes import smollm2
from torchtitan.trainer import Trainer
from torchtitan_recipes.pretraining import on_python_text


def smollm2_debugmodel() -> Trainer.Config:
    """A 3M-parameter SmolLM2 on the text of the running Python: no download, minutes on a CPU."""
    return on_python_text(smollm2("debug"))
