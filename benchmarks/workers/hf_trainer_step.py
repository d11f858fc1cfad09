"""Contestant: the Trainer of transformers, as its documentation uses it, on rows that are tokenized already."""

from pathlib import Path
from typing import Any

import torch
from contest import facts, read_rows, read_setup
from serving import Gate
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    """One row of tokens after the other."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens.flatten(0, 1)  # (N * B, S)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[index]
        return {"input_ids": row, "labels": row}  # the model shifts the labels


class GatedTrainer(Trainer):
    """Waits before each step; each is one micro-batch."""

    gate: Gate
    last: Tensor | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `transformers.Trainer.training_step`."""
        self.gate.wait(None if self.last is None else self.last.item)
        self.last = super().training_step(*args, **kwargs)
        return self.last

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main() -> None:
    """Train until nobody asks for another step."""
    setup = read_setup()
    gate = Gate({"facts": lambda: facts("transformers", "accelerate")})
    folder = Path(setup["folder"])
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    arguments = TrainingArguments(
        output_dir=str(folder / "hf_trainer"),
        per_device_train_batch_size=setup["rows"],
        num_train_epochs=1,
        learning_rate=setup["lr"],
        lr_scheduler_type="constant",
        weight_decay=setup["weight_decay"],
        adam_beta1=setup["betas"][0],
        adam_beta2=setup["betas"][1],
        adam_epsilon=setup["eps"],
        max_grad_norm=setup["max_grad_norm"],
        optim="adamw_torch_fused",
        dataloader_num_workers=1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        torch_compile=setup["compile"],
    )
    trainer = GatedTrainer(
        model=model, args=arguments, train_dataset=Rows(read_rows(setup)["tokens"])
    )
    trainer.gate = gate
    trainer.train()


if __name__ == "__main__":
    main()
