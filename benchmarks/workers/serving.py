"""The side of a contestant: answers questions, one JSON line each. Needs nothing but Python, so it runs in any environment.

A worker is a script beside this file. It calls `serve` with its functions, or stops a training loop that is not its own with a
`Gate`; `Worker` in ``benchmarks/peers.py`` starts it and asks. What libraries print goes to standard error, so that it
cannot be taken for an answer.
"""

import contextlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of those of ``packages`` that are there."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def peak_rss_gib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def cpu_s() -> float:
    """CPU seconds of this process and of those that it started, with all their threads; only on Linux of the latter."""
    ended, living = os.times(), 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # it may have ended
                    living += int(thread.read_text(encoding="ascii").split()[0])
    return time.process_time() + ended.children_user + ended.children_system + living / 1e9


class Line:
    """Questions from standard input, answers to what was standard output when this was made."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # also what C libraries print
        sys.stdout = sys.stderr

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and arguments of each question, until there are no more."""
        while text := sys.stdin.readline():
            question = json.loads(text)
            yield question["ask"], question["with"]

    def answer(self, value: Any) -> None:
        """Answer the question that came last."""
        print(json.dumps({"value": value}), file=self._answers, flush=True)

    def call(self, functions: dict[str, Callable[..., Any]], name: str, given: dict) -> None:
        """Answer it with what a function returns; tell the one who asked what went wrong otherwise."""
        try:
            self.answer(functions[name](**given))
        except Exception:  # noqa: BLE001 - whatever it is, the one who asked is told
            text = traceback.format_exc()
            print(json.dumps({"error": text}), file=self._answers, flush=True)


def serve(functions: dict[str, Callable[..., Any]]) -> None:
    """Call the function that each line of standard input names, until the input ends.

    A line is ``{"ask": name, "with": {argument: value}}``; its answer is ``{"value": result}``, or ``{"error": traceback}``
    after which the worker goes on.

    Args:
        functions: by name; what they take and return must be JSON.
    """
    line = Line()
    for name, given in line.questions():
        line.call(functions, name, given)


class Gate:
    """Holds a training loop between its steps, whoever wrote the loop.

    `wait` stands at one point of the loop's body. A question ``step`` lets the loop go on, and is answered when the loop is there
    again: so the time is that of the whole body, wherever the point is, and without the wait itself.

    Args:
        functions: for the other questions.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._line = Line()
        self._started: tuple[float, float] | None = None

    def wait(self, loss: Callable[[], float] | None = None) -> None:
        """Answer for the step that is done, and return at the next question for one.

        Args:
            loss: gives that of the step that is done; None at the first call. It is called when the time is taken.

        Raises:
            SystemExit: when there are no more questions.
        """
        if self._started is not None:
            seconds, cpu = time.perf_counter() - self._started[0], cpu_s() - self._started[1]
            value = loss() if loss else None
            self._line.answer({"seconds": seconds, "cpu_s": cpu, "loss": value})
        for name, given in self._line.questions():
            if name == "step":
                self._started = time.perf_counter(), cpu_s()
                return
            self._line.call(self._functions, name, given)
        sys.exit(0)
