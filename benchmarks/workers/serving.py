"""The side of a contestant: answers questions, one JSON line each. Needs nothing but Python, so it runs in any environment.

A worker is a script beside this file. It calls `serve` with its functions; `Worker` in ``benchmarks/peers.py`` starts it and
asks. What libraries print goes to standard error, so that it cannot be taken for an answer.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of those of ``packages`` that are there."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def serve(functions: dict[str, Callable[..., Any]]) -> None:
    """Call the function that each line of standard input names, until the input ends.

    A line is ``{"ask": name, "with": {argument: value}}``; its answer is ``{"value": result}``, or ``{"error": traceback}``
    after which the worker goes on.

    Args:
        functions: by name; what they take and return must be JSON.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # also what C libraries print
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            question = json.loads(line)
            answer = {"value": functions[question["ask"]](**question["with"])}
            text = json.dumps(answer)
        except Exception:  # noqa: BLE001 - whatever it is, the one who asked is told
            text = json.dumps({"error": traceback.format_exc()})
        print(text, file=answers, flush=True)
