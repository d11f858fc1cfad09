"""Contestant: torchtune's recipe for full fine-tuning on a single device, on rows that are tokenized already."""

import runpy
from pathlib import Path
from typing import Any

import torchtune
from contest import Setup, facts, read_rows, read_setup
from omegaconf import OmegaConf
from serving import Gate
from torch import Tensor
from torch.utils.data import Dataset

RECIPE = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"
Recipe: Any = runpy.run_path(str(RECIPE))["FullFinetuneRecipeSingleDevice"]  # as `tune run` does


class Rows(Dataset):
    """One row of tokens after the other; the recipe shifts the labels."""

    def __init__(self, tokenizer: "NoTokenizer", folder: str) -> None:
        del tokenizer
        self._rows = read_rows({"folder": folder})["tokens"].flatten(0, 1).tolist()  # (N * B, S)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self._rows[index], "labels": self._rows[index]}


class NoTokenizer:
    """What the recipe asks of a tokenizer when there is nothing to tokenize."""

    pad_id = 0
    max_seq_len = None


class GatedRecipe(Recipe):
    """Waits before each step; each is one micro-batch."""

    gate: Gate
    last: Tensor | None = None

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.gate.wait(None if self.last is None else self.last.item)
        loss = super()._loss_step(batch)
        self.last = loss.detach()
        return loss


def recipe_config(setup: Setup) -> dict[str, Any]:
    """The recipe's config for Llama 3 8B, at the size of the contest, in float32 on a CPU."""
    folder, model = Path(setup["folder"]), setup["model"]
    return {
        "output_dir": str(folder / "torchtune"),
        "model": {
            "_component_": "torchtune.models.llama3.llama3",
            "vocab_size": model["vocab_size"],
            "num_layers": model["num_hidden_layers"],
            "num_heads": model["num_attention_heads"],
            "num_kv_heads": model["num_key_value_heads"],
            "embed_dim": model["hidden_size"],
            "max_seq_len": model["max_position_embeddings"],
            "rope_base": int(model["rope_theta"]),
            "intermediate_dim": model["intermediate_size"],
            "norm_eps": model["rms_norm_eps"],
        },
        "tokenizer": {"_component_": "torchtune_step.NoTokenizer"},
        "dataset": {"_component_": "torchtune_step.Rows", "folder": str(folder)},
        "seed": 0,
        "shuffle": False,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder / "model"),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": str(folder / "torchtune"),
            "model_type": "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "batch_size": setup["rows"],
        "epochs": 1,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "lr": setup["lr"],
            "betas": setup["betas"],
            "eps": setup["eps"],
            "weight_decay": setup["weight_decay"],
            "fused": True,
        },
        "optimizer_in_bwd": False,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "clip_grad_norm": setup["max_grad_norm"],
        "compile": setup["compile"],
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "torchtune" / "logs"),
        },
        "log_every_n_steps": 10,
        "log_peak_memory_stats": False,
    }


def main() -> None:
    """Train until nobody asks for another step."""
    setup = read_setup()
    gate = Gate({"facts": lambda: facts("torchtune", "torchao")})
    config = OmegaConf.create(recipe_config(setup))
    recipe = GatedRecipe(config)
    recipe.gate = gate
    recipe.setup(config)
    recipe.train()


if __name__ == "__main__":
    main()
