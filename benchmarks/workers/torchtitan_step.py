"""Contestant: this Trainer, from text to the record of its metrics."""

from pathlib import Path
from typing import Any

from contest import facts, gemm, read_setup
from serving import Gate

from torchtitan.batch import Batch
from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.hugging_face.folder import read_model
from torchtitan.data.files import Files
from torchtitan.data.loader import Loader
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import StepMetrics, Trainer
from torchtitan.training.settings import Training


def recipe(setup: dict[str, Any]) -> Trainer.Config:
    """Full fine-tuning of the folder's model on its documents, in their order, at a constant rate."""
    folder = Path(setup["folder"])
    config = Trainer.Config(
        model=read_model(folder / "model")[1],
        data=Loader.Config(
            sources=[Files.Config(path=str(folder / "documents.jsonl"))], shuffle=False
        ),
        optimizer=AdamW.Config(lr=setup["lr"]),
        schedule=Schedule.Config(warmup_steps=0, decay_steps=0),
        training=Training.Config(
            steps=setup["steps"] + 1,  # the gate ends the run before the last one, which would save
            seq_len=setup["seq_len"],
            global_batch_rows=setup["rows"],
        ),
        checkpoint=Checkpointer.Config(resume="never", initial_load=str(folder / "model")),
        folder=str(folder / "run"),
    )
    config.compile.enabled = setup["compile"]
    return config


class GatedTrainer(Trainer):
    """Waits before each step."""

    gate: Gate
    last: StepMetrics | None = None

    def train_step(self, microbatches: list[Batch]) -> StepMetrics:
        """See `Trainer.train_step`."""
        self.gate.wait(lambda: self.last.loss.item() if self.last else 0.0)
        self.last = super().train_step(microbatches)
        return self.last


def main() -> None:
    """Train until nobody asks for another step."""
    setup = read_setup()
    gate = Gate({"facts": facts, "gemm": gemm})
    trainer = GatedTrainer(recipe(setup))
    trainer.gate = gate
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
