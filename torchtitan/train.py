"""``torchtitan train``: a recipe and its overrides, checked as a whole, then trained in one rank or many."""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torchtitan import __version__, environment, torch_api
from torchtitan.cli.ending import Ending, run_command
from torchtitan.cli.launch import launch
from torchtitan.cli.options import USAGE, TrainOptions, parse_options, refuse
from torchtitan.cli.output import say
from torchtitan.cli.ranks import CLOSE_S, be_a_rank
from torchtitan.cli.seat import check_meeting
from torchtitan.config.configurable import (
    Configurable,
    DescribesRun,
    KeepsCheckpoints,
    NeedsMachine,
    Problem,
)
from torchtitan.config.differences import differences
from torchtitan.config.help import help_text
from torchtitan.config.overrides import apply_flags
from torchtitan.config.recipes import Recipe, find_recipe
from torchtitan.config.show import format_tree
from torchtitan.config.tree import check_tree
from torchtitan.errors import ConfigError, DistributedError, Preempted
from torchtitan.secrets import masked

log = logging.getLogger("torchtitan.train")  # __name__ is __main__ in python -m torchtitan.train


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``torchtitan train`` with the arguments ``argv`` and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if environment.report_folder() is not None:
        be_a_rank(environment.launcher_pid())
    return run_command(lambda: _main(arguments), report=_report_file())


def _main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    if not environment.is_rank():
        refuse(check_meeting(options.nnodes, environment.meeting()))
    recipe = find_recipe(options.module, options.config)
    base = recipe.build()  # the first import of torch, in almost every recipe
    _name_folder(base, recipe)
    if options.help:
        say(f"{USAGE}\nfields of {recipe.name}:")
        say(help_text(base, program="torchtitan train", description=f"Recipe {recipe.name}."))
        return 0
    config, problems = apply_flags(base, options.flags)
    _name_folder(config, recipe)
    if environment.report_folder() is None:  # else the launcher has checked
        ranks_here, world_size = _count_ranks(options, problems)
        if options.dry_run_rank >= world_size:
            reason, last = f"is not one of the {world_size} ranks", world_size - 1
            remedy = f"write 0 to {last}" if last else "write 0"
            problems.append(Problem("--dry-run-rank", options.dry_run_rank, reason, remedy))
        if isinstance(config, NeedsMachine) and not options.dry_run:
            problems += config.check_machine()
        refuse([*problems, *check_tree(config, world_size)])
        if options.dry_run:
            say(_dry_run(recipe, base, config, world_size))
            if isinstance(config, DescribesRun):
                say(f"\n{config.describe_run(world_size, options.dry_run_rank)}")
            return 0
        if world_size > 1 and not environment.is_rank():
            ending = launch(
                argv, ranks_here=ranks_here, nnodes=options.nnodes, log_ranks=options.log_ranks
            )
            _with_last_checkpoint(ending, config).show()
            return ending.code
    _train(recipe, base, config)
    return 0


def _as_root(config: Configurable.Config, recipe: Recipe) -> RootConfig:
    if isinstance(config, RootConfig):
        return config
    raise ConfigError(
        f"--config {recipe.name}: returned {type(config).__qualname__}, which has no folder and build(); "
        "a recipe returns the root config, such as Trainer.Config(...)"
    )


def _name_folder(config: Configurable.Config, recipe: Recipe) -> None:
    root = _as_root(config, recipe)
    root.folder = root.folder or f"outputs/{recipe.name}"


def _count_ranks(options: TrainOptions, problems: list[Problem]) -> tuple[int, int]:
    """Ranks on this machine, and in all."""
    if environment.is_rank():
        return 1, environment.world_size()
    gpus = torch_api.cuda.device_count()
    ranks_here = options.ngpu or max(1, gpus)
    if 0 < gpus < ranks_here and not options.dry_run:
        reason = f"is more than the {gpus} GPUs of this machine"
        problems.append(Problem("--ngpu", ranks_here, reason, f"set it to {gpus} or less"))
    return ranks_here, ranks_here * options.nnodes


def _dry_run(
    recipe: Recipe, base: Configurable.Config, config: Configurable.Config, world_size: int
) -> str:
    changes = differences(base, config)
    title = f"recipe {recipe.module}:{recipe.name}, {world_size} rank{'s' * (world_size > 1)}"
    tree = format_tree(config, changed={change.path for change in changes})
    differing = "\n".join(f"  {change}" for change in changes)
    return f"{title}\n\n{tree}\n\ndiffers from the recipe:\n{differing or '  nothing'}"


def _with_last_checkpoint(ending: Ending, config: Configurable.Config) -> Ending:
    """Say what the run will resume from, when a rank died or hung."""
    if ending.code != DistributedError.exit_code or not isinstance(config, KeepsCheckpoints):
        return ending
    last = config.last_checkpoint()
    kept = (
        "there is no complete checkpoint yet" if last is None else f"last good checkpoint: {last}"
    )
    return dataclasses.replace(ending, text=f"{ending.text}\n{kept}")


def _train(recipe: Recipe, base: Configurable.Config, config: Configurable.Config) -> None:
    """Train in this process, alone or as one rank."""
    environment.setup_logging()
    log.info("torchtitan %s, recipe %s:%s", __version__, recipe.module, recipe.name)
    for change in differences(base, config):
        name = change.path.rpartition(".")[2]
        log.info("override %s=%r", change.path, masked({name: change.new})[name])
    with _stoppable():
        run = _as_root(config, recipe).build()
        try:
            run.train()
        except BaseException as error:
            with _leaving(error):
                run.close()
            raise
        run.close()


@contextlib.contextmanager
def _leaving(error: BaseException) -> Iterator[None]:
    """Let a run that failed close itself: its error is told before, and the wait for other ranks has an end."""
    ending, report = Ending.of(error), _report_file()
    if report is not None:
        ending.write(report)
    if environment.world_size() > 1 and not isinstance(error, Preempted):
        timer = threading.Timer(CLOSE_S, os._exit, (ending.code,))
        timer.daemon = True
        timer.start()
    try:
        yield
    except Exception as second:  # noqa: BLE001 - the first error is the one to tell
        # Without the others, closing fails like the collective before it: that is no news.
        if ending.code != DistributedError.exit_code:
            log.warning("closing the run failed too: %s: %s", type(second).__name__, second)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into `Preempted` where the run does not handle them itself."""

    def stop(number: int, frame: object) -> None:
        raise Preempted(
            f"stopped by {signal.Signals(number).name} outside of a step; nothing was saved"
        )

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_file() -> Path | None:
    folder = environment.report_folder()
    return folder / f"{environment.rank()}.json" if folder else None


if __name__ == "__main__":
    sys.exit(main())
