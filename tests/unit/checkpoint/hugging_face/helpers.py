"""Folders made here, without transformers."""

import json

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.export import Target, export
from torchtitan.checkpoint.hugging_face.weights import LiveWeights
from torchtitan.models.layers.init import init_weights


def small(**changes):
    config = tiny_model(
        **{"vocab_size": 4096, "hf_model_type": "llama", "context_length": 64, **changes}
    )
    model = config.build()
    init_weights(model, seed=1)
    return config, model


def exported(folder, config, model, **target):
    target = Target(**{"folder": folder, "dtype": "float32", **target})
    return export(LiveWeights(model), config, target, Agreement())


def edit(folder, change, file="model.safetensors"):
    """Let ``change`` alter the tensors of a file."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def nan_like(config):
    model = config.build()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan)
    return model
