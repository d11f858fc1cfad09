"""The arguments of every command that asks a model."""

import argparse

import torch

from torchtitan.cli.arguments import Arguments
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import ConfigError
from torchtitan.generation.source import Source, open_source


def add_arguments(parser: Arguments) -> None:
    """Give ``parser`` the model, and how it is opened."""
    parser.add_argument("source", help="a run's folder, a step-... folder, a Hugging Face folder, or a name on the hub")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (float32 on a CPU, else bfloat16)")  # fmt: skip
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--tokenizer", help="folder, tokenizer.json or name on the hub (default: the model's)")  # fmt: skip
    parser.add_argument("--chat-template", help="a file, chatml or llama3 (default: the tokenizer's)")  # fmt: skip


def open_model(arguments: argparse.Namespace) -> Source:
    """The model that was asked for.

    Raises:
        ConfigError: if an argument cannot be.
    """
    device = _device(arguments.device)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    tokenizer = None
    if arguments.tokenizer or arguments.chat_template:
        path = arguments.tokenizer or arguments.source
        tokenizer = Tokenizer.Config(path=path, chat_template=arguments.chat_template)
    return open_source(
        arguments.source, device=device, dtype=getattr(torch, dtype), tokenizer=tokenizer
    )


def _device(name: str | None) -> torch.device:
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if n_gpus else "cpu"))
    except RuntimeError:
        raise ConfigError(f"--device={name}: is no device; set cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= n_gpus:
        raise ConfigError(f"--device={name}: this machine has {n_gpus} usable GPUs; set cpu, or one of them")  # fmt: skip
    return device
