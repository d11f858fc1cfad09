"""``torchtitan import``: from a Hugging Face folder to a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.hugging_face.folder import find_folder, read_model
from torchtitan.checkpoint.hugging_face.loading import (
    check_aliases,
    check_tensors,
    fill_tensor,
    local_tensors,
)
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles
from torchtitan.checkpoint.hugging_face.weights import PREFIX
from torchtitan.cli.arguments import Arguments
from torchtitan.cli.output import say
from torchtitan.config.serialize import to_dict
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import CheckpointError
from torchtitan.models.model import Model


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan import ...`` and return its exit code."""
    parser = Arguments(
        "import",
        "Write the weights of a Hugging Face folder as a checkpoint, for checkpoint.initial_load. Needs memory for twice "
        "its largest tensor. (A recipe can also load the folder itself.)",
    )
    parser.add_argument("source", help="folder, or a model of the hub: org/name")
    parser.add_argument("to", type=Path, help="folder for the checkpoint")
    arguments = parser.parse(argv)
    if arguments is None:
        return 0
    if arguments.to.exists() and (not arguments.to.is_dir() or any(arguments.to.iterdir())):
        raise CheckpointError(f"{arguments.to} exists and is not empty; name another folder, or remove it")  # fmt: skip
    folder = find_folder(arguments.source)
    family, config = read_model(folder)
    with torch.device("meta"):
        model = config.build()
    files, layout = WeightFiles(folder), family.layout(config)
    check_tensors(files, layout)
    check_aliases(files, layout)
    tensors = {PREFIX + name: tensor.detach() for name, tensor in local_tensors(model).items()}

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(tensors[name], device="cpu")
        fill_tensor(files, layout, name.removeprefix(PREFIX), tensor)
        return tensor

    checkpointer = Checkpointer.Config().build(folder=arguments.to)
    checkpointer.save(0, tensors, {}, {"step": 0, "config": _origin(config, folder)}, read=read)
    path = checkpointer.latest()
    checkpointer.close()
    say(f"imported {len(tensors)} tensors of {folder} into {path}")
    return 0


def _origin(model: Model.Config, folder: Path) -> dict[str, Any]:
    """What other commands ask a checkpoint's config for: its model, tokenizer, and where settings of generation are."""
    place = str(folder.resolve())
    return {
        "model": to_dict(model),
        "tokenizer": to_dict(Tokenizer.Config(path=place)),
        "checkpoint": {"initial_load": place},
    }
