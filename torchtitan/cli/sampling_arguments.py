"""The arguments that ``torchtitan generate`` and ``torchtitan chat`` share."""

import argparse

from torchtitan.cli.arguments import Arguments
from torchtitan.cli.model_arguments import add_arguments as add_model_arguments
from torchtitan.cli.model_arguments import open_model
from torchtitan.cli.options import refuse
from torchtitan.errors import ConfigError
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import Source

_FROM_FOLDER = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def add_arguments(parser: Arguments) -> None:
    """Give ``parser`` the model and all that says how its tokens are chosen."""
    add_model_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="limit of an answer (256)")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token (default: the folder's, or 1)")  # fmt: skip
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="choose among the likeliest tokens of this joint probability")  # fmt: skip
    parser.add_argument("--min-p", type=float, help="leave out tokens below this part of the likeliest's probability")  # fmt: skip
    parser.add_argument("--repetition-penalty", type=float, help="above 1: what was there becomes less likely")  # fmt: skip
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (0)")


def open_generator(arguments: argparse.Namespace) -> tuple[Generator, Source]:
    """The generator of the model that was asked for.

    Raises:
        ConfigError: if an argument cannot be.
    """
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens={arguments.max_new_tokens}: is not positive; set 1 or more")  # fmt: skip
    source = open_model(arguments)
    return Generator(source.model, source.tokenizer), source


def sampling_of(arguments: argparse.Namespace, source: Source) -> Sampling.Config:
    """How tokens are chosen: as asked for, else as the folder recommends.

    Raises:
        ConfigError: if a setting is none.
    """
    config = Sampling.Config(seed=arguments.seed)
    drawn = bool(source.generation.get("do_sample"))
    for name in _FROM_FOLDER:
        asked = getattr(arguments, name)
        recommended = source.generation.get(name) if drawn or name == "repetition_penalty" else None
        if name == "top_k" and recommended in (0, -1):
            recommended = None  # all tokens, for transformers and for vLLM
        value = recommended if asked is None else asked
        if value is not None:
            setattr(config, name, value)
    refuse(list(config.check()))
    return config
