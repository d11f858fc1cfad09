"""``torchtitan train``: a recipe and its overrides, checked as a whole, then trained in one rank or many."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torchtitan import environment, torch_api
from torchtitan.cli.ending import Ending, run_command
from torchtitan.cli.launch import launch
from torchtitan.cli.options import USAGE, TrainOptions, parse_options, refuse
from torchtitan.cli.output import complain, say
from torchtitan.cli.ranks import be_a_rank
from torchtitan.cli.seat import check_meeting
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.config.differences import differences
from torchtitan.config.help import help_text
from torchtitan.config.overrides import apply_flags
from torchtitan.config.recipes import Recipe, find_recipe
from torchtitan.config.show import format_tree
from torchtitan.config.tree import check_tree, clone
from torchtitan.errors import ConfigError, Preempted

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds that a rank gets to close after a failure; the others may be waiting for it."""


class Run(Protocol):
    """What a root config builds."""

    def train(self) -> None:
        """Train to the end."""
        ...

    def close(self) -> None:
        """Let go of files, workers and the other ranks; also called after an error."""
        ...


@runtime_checkable
class RootConfig(Protocol):
    """The config that a recipe returns: everything of a run."""

    folder: str
    """Run folder; empty means ``outputs/<recipe name>``."""

    def build(self) -> Run:
        """Build the run."""
        ...
