"""The arguments that ``torchtitan generate`` and ``torchtitan chat`` share."""

import argparse

import torch

from torchtitan.cli.arguments import Arguments
from torchtitan.cli.options import refuse
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import ConfigError
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import Source, open_source

_FROM_FOLDER = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def add_arguments(parser: Arguments) -> None:
    """Give ``parser`` the source and all that says how its tokens are chosen."""
    parser.add_argument("source", help="a run's folder, a step-... folder, a Hugging Face folder, or a name on the hub")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=256, help="limit of an answer (256)")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token (default: the folder's, or 1)")  # fmt: skip
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="choose among the likeliest tokens of this joint probability")  # fmt: skip
    parser.add_argument("--min-p", type=float, help="leave out tokens below this part of the likeliest's probability")  # fmt: skip
    parser.add_argument("--repetition-penalty", type=float, help="above 1: what was there becomes less likely")  # fmt: skip
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (float32 on a CPU, else bfloat16)")  # fmt: skip
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--tokenizer", help="folder, tokenizer.json or name on the hub (default: the model's)")  # fmt: skip
    parser.add_argument("--chat-template", help="a file, chatml or llama3 (default: the tokenizer's)")  # fmt: skip


def open_generator(arguments: argparse.Namespace) -> tuple[Generator, Source]:
    """The generator of the source that was asked for.

    Raises:
        ConfigError: if an argument cannot be.
    """
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens={arguments.max_new_tokens}: is not positive; set 1 or more")  # fmt: skip
    device = _device(arguments.device)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    tokenizer = None
    if arguments.tokenizer or arguments.chat_template:
        path = arguments.tokenizer or arguments.source
        tokenizer = Tokenizer.Config(path=path, chat_template=arguments.chat_template)
    source = open_source(
        arguments.source, device=device, dtype=getattr(torch, dtype), tokenizer=tokenizer
    )
    return Generator(source.model, source.tokenizer), source


def sampling_of(arguments: argparse.Namespace, source: Source) -> Sampling.Config:
    """How tokens are chosen: as asked for, else as the folder recommends.

    Raises:
        ConfigError: if a setting is none.
    """
    config = Sampling.Config(seed=arguments.seed)
    recommended = source.generation if source.generation.get("do_sample") else {}
    for name in _FROM_FOLDER:
        asked = getattr(arguments, name)
        value = recommended.get(name) if asked is None else asked
        if value is not None:
            setattr(config, name, value)
    refuse(list(config.check()))
    return config


def _device(name: str | None) -> torch.device:
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if n_gpus else "cpu"))
    except RuntimeError:
        raise ConfigError(f"--device={name}: is no device; set cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= n_gpus:
        raise ConfigError(f"--device={name}: this machine has {n_gpus} usable GPUs; set cpu, or one of them")  # fmt: skip
    return device
