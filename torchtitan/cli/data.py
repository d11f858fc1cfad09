"""``torchtitan data show``: what a recipe's model sees, and what it learns from it."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice

from torchtitan import environment
from torchtitan.cli.options import parse_options, refuse
from torchtitan.cli.output import say
from torchtitan.config import check_tree
from torchtitan.config.configurable import Problem
from torchtitan.config.overrides import apply_flags
from torchtitan.config.recipes import find_recipe
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.show import BRACKETED, COLOURED, shown
from torchtitan.data.chat.source import Chat
from torchtitan.data.source import BadRow, documents
from torchtitan.errors import ConfigError
from torchtitan.trainer import Trainer

USAGE = """\
usage: torchtitan data show --module M --config C [--n 2] [--section.field value ...]

Prints the first conversations of the recipe's training data as the model sees them. What is learned is green, or
between ⟦ and ⟧ where there are no colours; a row that cannot be used is told with its reason.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan data ...`` and return its exit code."""
    command, *arguments = argv or ["--help"]
    if command in ("-h", "--help") or "--help" in arguments:
        say(USAGE)
        return 0
    if command != "show":
        raise ConfigError(f"data {command}: is not understood\n{USAGE}")
    options = parse_options(arguments)
    count = next((flag.text for flag in options.flags if flag.name == "n"), "2")
    base = find_recipe(options.module, options.config).build()
    config, problems = apply_flags(base, (flag for flag in options.flags if flag.name != "n"))
    if not count.isdecimal() or int(count) < 1:
        problems.append(
            Problem("--n", count, "is not a whole number above 0", "write --n 1 or more")
        )
    refuse([*problems, *check_tree(config, 1)])
    if not isinstance(config, Trainer.Config) or not isinstance(config.data, ChatLoader.Config):
        raise ConfigError(
            f"--config {options.config}: its data is no ChatLoader, and text is learned as a whole; name a recipe "
            "with conversations, such as --module torchtitan_recipes.sft --config llama3_debugmodel_sft"
        )
    say("\n\n".join(islice(_conversations(config, config.data), int(count))))
    return 0


def _conversations(config: Trainer.Config, data: ChatLoader.Config) -> Iterator[str]:
    tokenizer = config.tokenizer.build()
    encoder = data.encoder(tokenizer, config.training.seq_len)
    marks = COLOURED if sys.stdout.isatty() and not environment.no_color() else BRACKETED
    for source in data.sources:
        if not isinstance(source, Chat.Config):
            continue
        for place, found in documents(source.open(encoder)):
            if isinstance(found, BadRow):
                yield f"--- {place}: left out ({found.kind}): {found.reason}"
                continue
            for sample in found.samples:
                learned = int(sample.learned[1:].sum())
                head = f"--- {place}: {len(sample)} tokens, {learned} learned"
                yield f"{head}\n{shown(sample, tokenizer, marks)}"
