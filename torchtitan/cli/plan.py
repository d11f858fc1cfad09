"""``torchtitan plan``: what a run needs, before it is started: memory, work and least time, on any number of ranks."""

from collections.abc import Sequence

from torchtitan.cli.options import DEFAULT_CONFIG, DEFAULT_MODULE, parse_options, refuse
from torchtitan.cli.output import say
from torchtitan.config.configurable import Problem
from torchtitan.config.overrides import Flag, apply_flags
from torchtitan.config.recipes import Recipe, find_recipe
from torchtitan.config.tree import check_tree
from torchtitan.errors import ConfigError
from torchtitan.planner.advice import advise
from torchtitan.planner.devices import NODE_RANKS, find_device
from torchtitan.planner.memory import plan_memory
from torchtitan.planner.report import Report
from torchtitan.planner.verify import verify
from torchtitan.planner.work import bounds_of, work_of
from torchtitan.trainer import Trainer

USAGE = f"""\
usage: torchtitan plan [options] [--section.field value ...]

Memory of each rank, floating-point operations, bytes and least time of a step; no GPU, no weights, no download.

options:
  --module M     importable module, or path of a .py file, with the recipe (default {DEFAULT_MODULE})
  --config C     the recipe (default {DEFAULT_CONFIG})
  --ngpu N       ranks on a machine (default 1)
  --nnodes N     machines (default 1)
  --device D     what it is to fit: H100-80GB (default), H200, B200, A100-80GB, A100-40GB, MI300X, L40S, RTX4090, ..., or
                 an amount of memory such as 24GiB
  --verify       check the closed form: count the tensors of a step on fake ranks, with 2 and 4 layers, and extrapolate

Every field of the recipe's config can be overridden, as in torchtitan train.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan plan ...`` and return its exit code."""
    options = parse_options(argv)
    if options.help:
        say(USAGE)
        return 0
    ours = {flag.name: flag for flag in options.flags if flag.name in ("device", "verify")}
    problems = _problems(ours)
    if options.dry_run:
        problems.append(
            Problem("--dry-run", "", "is torchtitan train's", "leave it out: a plan starts nothing")
        )
    recipe = find_recipe(options.module, options.config)
    config, wrong = apply_flags(
        recipe.build(), tuple(flag for flag in options.flags if flag.name not in ours)
    )
    node_ranks = options.ngpu or 1
    world_size = node_ranks * options.nnodes
    refuse([*problems, *wrong, *check_tree(config, world_size)])
    device = ours["device"].text if "device" in ours else "H100-80GB"
    report = _report(
        recipe, config, world_size, min(node_ranks, NODE_RANKS), device, verified="verify" in ours
    )
    say(str(report))
    return 0


def _problems(flags: dict[str, Flag]) -> list[Problem]:
    found: list[Problem] = []
    if "verify" in flags and flags["verify"].values:
        text = flags["verify"].text
        found.append(Problem("--verify", text, "takes no value", "write --verify alone"))
    if "device" in flags and len(flags["device"].values) != 1:
        values = flags["device"].values
        found.append(
            Problem(
                "--device",
                values,
                f"takes one value, got {len(values)}",
                "write --device H100-80GB",
            )
        )
    return found


def _report(
    recipe: Recipe,
    config: object,
    world_size: int,
    node_ranks: int,
    device_name: str,
    *,
    verified: bool,
) -> Report:
    device = find_device(device_name)
    if not isinstance(config, Trainer.Config):
        raise ConfigError(
            f"--config {recipe.name}: returned {type(config).__qualname__}, and the planner knows Trainer.Config; "
            "plan a recipe that returns one"
        )
    work = work_of(config, world_size)
    mesh = config.parallelism.resolve(world_size).equation()
    memory = plan_memory(config, world_size)
    return Report(
        title=f"recipe {recipe.module}:{recipe.name} on {world_size} rank{'s' * (world_size > 1)}: {mesh}",
        device=device,
        memory=memory,
        work=work,
        bounds=bounds_of(work, device, node_ranks=node_ranks),
        changes=list(advise(config, world_size, device.memory)),
        verification=verify(config, world_size) if verified else None,
    )
