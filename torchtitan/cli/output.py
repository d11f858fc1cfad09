"""The one place that writes to the terminal for the commands."""

import sys
from typing import TextIO


def say(text: str) -> None:
    """Write what the user asked for, to stdout."""
    _write(sys.stdout, text.rstrip("\n") + "\n")


def trickle(text: str) -> None:
    """Write a piece of what the user asked for, to stdout, at once."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """Write what went wrong, to stderr."""
    sys.stdout.flush()
    _write(sys.stderr, text.rstrip("\n") + "\n")


def _write(stream: TextIO, text: str) -> None:
    """Write and flush; what an encoding other than UTF-8 lacks comes as its number, so that no text ends a command."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()
