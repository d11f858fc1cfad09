"""Contestant: a hand-written loop over this library's model, with its fused loss."""

from pathlib import Path

import torch
from contest import bare_loop, facts, read_setup
from serving import Gate
from torch import Tensor

from torchtitan.batch import IGNORE_INDEX
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.folder import read_model
from torchtitan.checkpoint.initial import load_initial


def main() -> None:
    """Train until nobody asks for another step."""
    setup = read_setup()
    gate = Gate({"facts": facts})
    source = Path(setup["folder"]) / "model"
    config = read_model(source)[1]
    model = config.build()
    load_initial(str(source), config, model, Agreement())
    if setup["compile"]:
        for block in model.blocks():
            block.compile()
    positions = torch.arange(setup["seq_len"]).expand(setup["rows"], -1)
    documents = torch.zeros_like(positions)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden_states = model(tokens, positions, documents)
        return model.head(hidden_states, labels) / (labels != IGNORE_INDEX).sum()

    bare_loop(gate, setup, model, loss_of)


if __name__ == "__main__":
    main()
