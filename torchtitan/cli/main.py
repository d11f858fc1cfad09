"""The ``torchtitan`` command: finds the subcommand's module and hands over."""

import importlib
import sys
from collections.abc import Sequence

from torchtitan import __version__
from torchtitan.cli.ending import run_command
from torchtitan.cli.output import say
from torchtitan.config.suggest import did_you_mean
from torchtitan.environment import VARIABLES
from torchtitan.errors import EXIT_CODES, ConfigError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "torchtitan.train",
        "train a recipe: --module M --config C [--section.field value ...]",
    ),
    "plan": (
        "torchtitan.cli.plan",
        "memory, work and least time of a run, before it is started: train's options, --device D, --verify",
    ),
    "download": ("torchtitan.cli.download", "fetch a model from the Hugging Face Hub"),
    "export": ("torchtitan.cli.export", "write a checkpoint as a Hugging Face folder"),
    "import": ("torchtitan.cli.import_folder", "write a Hugging Face folder as a checkpoint"),
    "generate": (
        "torchtitan.cli.generate",
        "continue texts with a checkpoint or a Hugging Face model",
    ),
    "chat": ("torchtitan.cli.chat", "talk to a checkpoint or a Hugging Face model"),
    "perplexity": ("torchtitan.cli.perplexity", "how well a model predicts the texts of files"),
    "evaluate": ("torchtitan.cli.evaluate", "scores of a model in the tasks of lm-eval"),
    "recipes": ("torchtitan.cli.recipes", "list recipes, show one's config, compare two"),
    "data": (
        "torchtitan.cli.data",
        "show conversations as the model sees them, what is learned in colour",
    ),
}
"""Name -> the module whose ``main(arguments) -> exit code`` runs it, and what it does. Imported when it is run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``torchtitan <command> ...`` and return its exit code."""
    return run_command(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        say(_help())
        return 0
    if argv[0] == "--version":
        say(f"torchtitan {__version__}")
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        raise ConfigError(
            f"{name}: no such command; {did_you_mean(name, COMMANDS, kind='commands')}"
        )
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")  # a recipe next to the user is found, as with python -m
    return importlib.import_module(COMMANDS[name][0]).main(arguments)


def _help() -> str:
    return "\n\n".join(
        (
            "usage: torchtitan COMMAND ...",
            _table(
                "commands (each has its own --help)", {n: text for n, (_, text) in COMMANDS.items()}
            ),
            _table("exit codes", {str(code): text for code, text in EXIT_CODES.items()}),
            _table("environment variables", VARIABLES),
        )
    )


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return f"{title}:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
