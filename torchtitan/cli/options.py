"""The command line of ``torchtitan train``: a few options of the launch, and overrides of the recipe."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.config.configurable import Problem
from torchtitan.config.overrides import Flag, split_flags
from torchtitan.errors import ConfigError

DEFAULT_MODULE = "torchtitan_recipes.models.llama3"
DEFAULT_CONFIG = "llama3_debugmodel"

USAGE = f"""\
usage: torchtitan train [options] [--section.field value ...]

options:
  --module M     importable module, or path of a .py file, with the recipe (default {DEFAULT_MODULE})
  --config C     the recipe: a function there that returns the root config (default {DEFAULT_CONFIG})
  --ngpu N       processes on this machine (default: one a GPU; one if there is no GPU, more then run on the CPU)
  --nnodes N     machines that train together (default 1); see torchtitan --help for their variables
  --log-rank R   which of this machine's processes show their output: 0 or 0,1 or all (default 0)
  --dry-run      resolve and check the config, print it, what differs from the recipe, and what a rank will hold and
                 send; --ngpu and --nnodes may be more than this machine has
  --dry-run-rank R  the same, for rank R instead of 0
  --help         this, and every field of the recipe

Every field of the recipe's config can be overridden: --section.field value, or --section.field=value for a value
that starts with dashes. Lists take several values; entries of a list of sections are numbered from 0; None turns an
optional section off; a bool alone means True.
"""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """A parsed command line.

    Attributes:
        module: of the recipe.
        config: the recipe's name.
        ngpu: processes on this machine; None means as many as GPUs.
        nnodes: machines.
        log_ranks: local ranks that show their output; None means all.
        dry_run: check and print only.
        dry_run_rank: the rank that a dry run describes.
        help: print the help only.
        flags: overrides of the recipe.
    """

    module: str
    config: str
    ngpu: int | None
    nnodes: int
    log_ranks: frozenset[int] | None
    dry_run: bool
    dry_run_rank: int
    help: bool
    flags: tuple[Flag, ...]


def parse_options(argv: Sequence[str]) -> TrainOptions:
    """Read a command line as far as it can be read without the recipe.

    Raises:
        ConfigError: listing everything that is wrong with it.
    """
    wants_help = any(argument in ("-h", "--help") for argument in argv)
    flags, problems = split_flags(a for a in argv if a not in ("-h", "--help"))
    names = ("module", "config", "ngpu", "nnodes", "log-rank", "dry-run", "dry-run-rank")
    ours = {flag.name: flag for flag in flags if flag.name in names}
    reader = _Reader(ours, problems)
    options = TrainOptions(
        module=reader.text("module") or DEFAULT_MODULE,
        config=reader.text("config") or DEFAULT_CONFIG,
        ngpu=reader.count("ngpu"),
        nnodes=reader.count("nnodes") or 1,
        log_ranks=reader.ranks("log-rank"),
        dry_run=reader.switch("dry-run") or "dry-run-rank" in ours,
        dry_run_rank=reader.number("dry-run-rank"),
        help=wants_help,
        flags=tuple(flag for flag in flags if flag.name not in names),
    )
    refuse(problems)
    return options


def refuse(problems: Sequence[Problem]) -> None:
    """Raise a `ConfigError` that lists the problems, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{count}, nothing was started{listed}")


@dataclass(frozen=True, slots=True)
class _Reader:
    flags: dict[str, Flag]
    problems: list[Problem]

    def text(self, name: str) -> str | None:
        flag = self.flags.get(name)
        if flag is None:
            return None
        if len(flag.values) != 1 or not flag.text:
            self.problem(flag, f"takes one value, got {len(flag.values)}", f"write --{name} VALUE")
        return flag.text

    def count(self, name: str) -> int | None:
        flag = self.flags.get(name)
        if flag is None:
            return None
        if not flag.text.isdecimal() or int(flag.text) < 1:
            self.problem(flag, "is not a whole number above 0", f"write --{name} 1 or more")
            return None
        return int(flag.text)

    def number(self, name: str) -> int:
        flag = self.flags.get(name)
        if flag is not None and not flag.text.isdecimal():
            self.problem(flag, "is not a rank", f"write --{name} 0 or more")
            return 0
        return int(flag.text) if flag else 0

    def ranks(self, name: str) -> frozenset[int] | None:
        flag = self.flags.get(name)
        if flag is None:
            return frozenset({0})
        parts = [part for value in flag.values for part in value.split(",")]
        if parts == ["all"]:
            return None
        if not parts or not all(part.isdecimal() for part in parts):
            self.problem(flag, "names no ranks", f"write --{name} 0 or 0,1 or all")
            return None
        return frozenset(map(int, parts))

    def switch(self, name: str) -> bool:
        flag = self.flags.get(name)
        if flag is not None and flag.values:
            self.problem(flag, "takes no value", f"write --{name} alone")
        return flag is not None

    def problem(self, flag: Flag, reason: str, remedy: str) -> None:
        self.problems.append(Problem(f"--{flag.name}", flag.text, reason, remedy))
