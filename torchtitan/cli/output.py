"""The one place that writes to the terminal for the commands."""

import sys


def say(text: str) -> None:
    """Write what the user asked for, to stdout."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def trickle(text: str) -> None:
    """Write a piece of what the user asked for, to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Write what went wrong, to stderr."""
    sys.stdout.flush()
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
