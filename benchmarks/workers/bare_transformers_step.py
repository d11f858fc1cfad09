"""Contestant: a hand-written loop over the model of transformers."""

from pathlib import Path

import torch
from contest import bare_loop, facts, read_setup
from serving import Gate
from torch import Tensor
from transformers import AutoModelForCausalLM


def main() -> None:
    """Train until nobody asks for another step."""
    setup = read_setup()
    gate = Gate({"facts": lambda: facts("transformers")})
    model = AutoModelForCausalLM.from_pretrained(Path(setup["folder"]) / "model", dtype="float32")
    model.config.use_cache = False
    if setup["compile"]:
        for block in model.model.layers:
            block.compile()
    model.train()

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    bare_loop(gate, setup, model, loss_of)


if __name__ == "__main__":
    main()
