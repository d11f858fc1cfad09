"""``--help`` of a recipe: every field with its docstring and the recipe's value as default."""

import contextlib
import io

import tyro

from torchtitan.config.configurable import Configurable


def help_text(config: Configurable.Config, *, program: str, description: str) -> str:
    """All that can be overridden in ``config``, section by section.

    Args:
        config: root of the recipe's tree.
        program: the command, for the usage line.
        description: text above the fields.
    """
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        tyro.cli(
            type(config),
            default=config,
            args=["--help"],
            prog=program,
            description=description,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )
    return written.getvalue()
