"""Command lines of the commands that take a few paths and options."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from torchtitan.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are ours.

    Args:
        command: its name.
        description: what it does.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"torchtitan {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.prog}: {message}\n{self.format_usage()}")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace | None:
        """The arguments; None if the help was asked for, and shown."""
        if any(argument in ("-h", "--help") for argument in argv):
            self.print_help()
            return None
        return self.parse_args(argv)
