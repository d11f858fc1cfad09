"""How long until a command answers, a library is imported and the first step is done, beside the peers?

Each is a process of its own, started in turn with the others, round by round. Help and imports are whole processes. The first step
is that of `step_speed`: from the start of Python to the end of the step, with imports, reading the model's folder, data and optimizer.

    python -m benchmarks.first_step [--rounds 5] [--json FILE]

At the first use the peers are installed, each into an environment of its own.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import (
    ROOT,
    Spread,
    Worker,
    environment,
    in_turn,
    machine,
    spread,
    table,
    write_json,
)
from benchmarks.step_speed import BARE, HF, OURS, PEERS, TORCHTUNE, Environment, make_contest

HERE: Environment | None = None  # the one that runs this
PUBLIC: Environment = "torchtitan_public", ["torchtitan==0.3.0", "triton==3.7.1"]

Measured = dict[str, float]
"""``seconds``, of the clock, and ``cpu_s``, user and system, of the process and those that it starts."""

MAIN = "import sys; from {} import main; sys.exit(main())"  # what a console script is
OUR_CLI = HERE, MAIN.format("torchtitan.cli.main")
ACCELERATE = HF, MAIN.format("accelerate.commands.accelerate_cli")
TUNE = TORCHTUNE, MAIN.format("torchtune._cli.tune")
PUBLIC_CLI = PUBLIC, "import runpy; runpy.run_module('torchtitan.train', run_name='__main__')"
HELP = {  # command: what runs it, arguments
    "torchtitan --help": (*OUR_CLI, "--help"),
    "accelerate --help": (*ACCELERATE, "--help"),
    "transformers --help": (HF, MAIN.format("transformers.cli.transformers"), "--help"),
    "tune --help": (*TUNE, "--help"),
}
HELP_OF_A_RUN = {
    "torchtitan train --help": (*OUR_CLI, "train", "--help"),
    "accelerate launch --help": (*ACCELERATE, "launch", "--help"),
    "tune run --help": (*TUNE, "run", "--help"),
    "public torchtitan 0.3.0 --help": (
        *PUBLIC_CLI,
        *("--module", "llama3", "--config", "llama3_debugmodel", "--help"),
    ),
}
IMPORTS = {  # what a training script imports
    "torch": (HERE, "import torch"),
    "torchtitan, a recipe": (HERE, "import torchtitan_recipes.models.llama3"),
    "transformers, Trainer": (HF, "from transformers import AutoModelForCausalLM, Trainer"),
    "torchtune, recipe": (
        TORCHTUNE,
        "import pathlib, runpy, torchtune; runpy.run_path("
        "pathlib.Path(torchtune.__file__).parents[1] / 'recipes/full_finetune_single_device.py')",
    ),
    "public torchtitan 0.3.0, its trainer": (PUBLIC, "import torchtitan.train"),
}


def whole_process(
    python: Path | None, code: str, folder: str, arguments: Sequence[str]
) -> Measured:
    """Run Python to its end.

    Args:
        python: of the environment; None for this one.
        code: to run.
        folder: to run it in, where no package of ours is found by chance.
        arguments: of the code.

    Raises:
        SystemExit: if it fails.
    """
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if python is None:
        variables["PYTHONPATH"] = str(ROOT)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [python or sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{code} {arguments} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu}


def first_step(start: Callable[[], Worker]) -> Measured:
    """Start a contestant and let it make one step."""
    begin = time.perf_counter()
    with start() as worker:
        worker.ask("step")
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "cpu_s": worker.ask("facts")["cpu_s"]}


Question = Callable[[], dict[str, Callable[[], Measured]]]
"""What is measured, by which call; it sets the environments up that it needs, so it is for those that are asked alone."""


def questions(folder: str, setup: dict[str, Any], args: argparse.Namespace) -> dict[str, Question]:
    """All of them by name."""

    def python_of(env: Environment | None) -> Path | None:
        return None if env is None else environment(*env)

    def kept(names: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in names.items() if not any(word in k for word in args.without)}

    def process(env: Environment | None, code: str, *arguments: str) -> Callable[[], Measured]:
        return partial(whole_process, python_of(env), code, folder, arguments)

    def processes(names: dict[str, Any]) -> Question:
        return lambda: {name: process(*of) for name, of in kept(names).items()}

    scripts = {OURS: ("torchtitan_step.py", HERE), BARE: ("bare_step.py", HERE)} | PEERS
    environ = {"HF_HUB_OFFLINE": "1"}
    if args.threads:
        environ["OMP_NUM_THREADS"] = str(args.threads)
    return {
        "help": processes(HELP),
        "help of a run": processes(HELP_OF_A_RUN),
        "import": processes(IMPORTS),
        "first step": lambda: {
            name: partial(
                first_step,
                partial(Worker, name, script, setup, python=python_of(env), environ=environ),
            )
            for name, (script, env) in kept(scripts).items()
        },
    }


def main() -> None:
    """Measure, print tables and optionally write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="words of what to leave out")
    parser.add_argument("--only", nargs="*", help="of: help, help of a run, import, first step")
    parser.add_argument("--threads", type=int, help="of each first step; the default is torch's")
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    head, result = machine(), {}
    sizes = argparse.Namespace(
        dim=256, layers=4, rows=4, seq_len=512, warmup=0, rounds=1, compile=False
    )
    print(head)
    with tempfile.TemporaryDirectory() as folder:
        setup = make_contest(Path(folder), sizes)
        for question, prepare in questions(folder, setup, args).items():
            if args.only and question not in args.only:
                continue
            found = in_turn(prepare(), rounds=args.rounds, warmup=1)
            result[question] = {
                name: {
                    clock: spread([m[clock] for m in measured]) for clock in ("seconds", "cpu_s")
                }
                for name, measured in found.items()
            }
            print(f"\n{table(rows_of(result[question]), header=[question, 'CPU s', 'wall s'])}")
    write_json(args.json, {**head, "rounds": args.rounds, "results": result})


def rows_of(found: dict[str, dict[str, Spread]]) -> list[list[object]]:
    """A table's rows."""
    return [[name, measured["cpu_s"], measured["seconds"]] for name, measured in found.items()]


if __name__ == "__main__":
    main()
