"""The docstring rules fire, so that a clean run means something."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SAMPLE = '''"""A sample."""


def scale(value: float, factor: float) -> float:
    """Scale a value.

    Args:
        value: what is scaled.
        {name}: by how much.
    """
    return value * factor
'''


def rules(name):
    command = [
        "ruff",
        "check",
        "--output-format",
        "json",
        "--stdin-filename",
        "torchtitan/x.py",
        "-",
    ]
    out = subprocess.run(
        [sys.executable, "-m", *command],
        input=SAMPLE.format(name=name),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return {found["code"] for found in json.loads(out.stdout)}


def test_an_argument_list_that_is_not_true_is_found():
    assert rules("factr") == {"DOC102", "D417"}


def test_a_true_one_is_not():
    assert rules("factor") == set()
