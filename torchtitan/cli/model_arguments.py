"""The arguments of every command that asks a model."""

import argparse

import torch

from torchtitan.cli.arguments import Arguments
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.generation.source import Source, open_source


def add_arguments(parser: Arguments) -> None:
    """Give ``parser`` the model, and how it is opened."""
    parser.add_argument("source", help="a run's folder, a step-... folder, a Hugging Face folder, or a name on the hub")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (float32 on a CPU, else bfloat16)")  # fmt: skip
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--tokenizer", help="folder, tokenizer.json or name on the hub (default: the model's)")  # fmt: skip
    parser.add_argument("--chat-template", help="a file, chatml or llama3 (default: the tokenizer's)")  # fmt: skip


def open_model(arguments: argparse.Namespace) -> Source:
    """The model that was asked for."""
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    tokenizer = None
    if arguments.tokenizer or arguments.chat_template:
        path = arguments.tokenizer or arguments.source
        tokenizer = Tokenizer.Config(path=path, chat_template=arguments.chat_template)
    return open_source(
        arguments.source, device=device, dtype=getattr(torch, dtype), tokenizer=tokenizer
    )
