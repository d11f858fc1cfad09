"""How much CPU time passes before the first tensor: each command against its budget.

    python benchmarks/startup.py [repeats]

Commands that need no recipe are compared with zero, the others with a bare ``import torch`` in the same rounds, so
that a slow machine counts on both sides. Prints the least of each in CPU seconds: what a busy machine adds is noise.
"""

import subprocess
import sys

BUDGET_S = 0.5
CLI = "import sys; from torchtitan.cli.main import main; sys.exit(main(sys.argv[1:]))"
DRY_RUN = (
    "train",
    "--dry-run",
)  # also builds the model on the meta device and counts its traffic: no budget
COMMANDS = {  # arguments: whether it imports torch
    ("--help",): False,
    ("recipes", "list"): False,
    ("train", "--module", "torchtitan_recipes.models.nothing"): False,
    ("train", "--config", "nothing"): False,
    ("train", "--ngpu", "none"): False,
    ("train", "--help"): True,
    ("train", "--training.stepz", "3"): True,
    ("train", "--model.attention.n-heads", "3", "--parallelism.tp", "2", "--ngpu", "3"): True,
    ("train", "--training.steps", "x", "--ngpu", "3"): True,
    DRY_RUN: True,
}
MEASURE = """
import os, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
times = os.times()
print(times.children_user + times.children_system)
"""


def cpu_s(code: str, *arguments: str) -> float:
    """CPU seconds, user and system, of a Python process that runs ``code``."""
    command = [sys.executable, "-c", MEASURE, sys.executable, "-c", code, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Measure all commands; return 1 if one is over its budget."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    bare: list[float] = []
    taken: dict[tuple[str, ...], list[float]] = {command: [] for command in COMMANDS}
    for _ in range(repeats):
        bare.append(cpu_s("import torch"))
        for command in COMMANDS:
            taken[command].append(cpu_s(CLI, *command))
    print(f"import torch: {min(bare):.2f} s of CPU; budget on top: {BUDGET_S} s")
    over = 0
    for command, times in taken.items():
        seconds = min(times) - (min(bare) if COMMANDS[command] else 0.0)
        over += seconds > BUDGET_S and command != DRY_RUN
        base = "+ import torch" if COMMANDS[command] else ""
        print(f"{seconds:6.2f} s {base:15} torchtitan {' '.join(command)}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
