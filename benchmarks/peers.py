"""What the benchmarks share: peers in environments of their own, measured in turn in one run, and how results are told.

A *contestant* is a worker script of ``benchmarks/workers/`` that runs in a Python environment: ours, or one that is made
here for a peer with pinned versions and kept for the next time. Workers answer one at a time (`Worker.ask`), so that
`in_turn` can measure them in interleaved rounds: what disturbs the machine disturbs all of them.

    python_of_peer = environment("hf_trainer", ["transformers==5.24.0", "accelerate==1.15.0"])
    with Worker("ours", "bare_step.py", setup) as ours, Worker("hf", "hf_step.py", setup, python=python_of_peer) as hf:
        assert_equal({w.name: w.ask("loss") for w in (ours, hf)}, relative=1e-4)
        times = in_turn({w.name: partial(w.ask, "step") for w in (ours, hf)}, rounds=40)
    ratio = spread(ratios(times["hf"], times["ours"]))
"""

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

TORCH = "torch==2.13.0"
ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "benchmarks" / ".envs"
WORKERS = ROOT / "benchmarks" / "workers"


class PeerError(RuntimeError):
    """A contestant could not be set up, or did not answer."""


def environment(
    name: str, requirements: Sequence[str], *, torch: str = TORCH, folder: Path = ENVIRONMENTS
) -> Path:
    """The Python of a peer's own virtual environment, which is made at the first use.

    Torch is installed first and stays at that version, so that all contestants run the same one.

    Args:
        name: of the environment.
        requirements: pinned, ``package==version``.
        torch: requirement of torch; empty for an environment without it.
        folder: where environments are kept.

    Raises:
        ValueError: if a requirement has no version.
        PeerError: if the packages cannot be installed; nothing is left that would be taken for an environment.
    """
    for requirement in [*requirements, *([torch] if torch else [])]:
        if "==" not in requirement:
            raise ValueError(f"{requirement!r} has no version; write {requirement}==VERSION")
    home = folder / name
    python, complete = home / "bin" / "python", home / "complete.json"
    wanted = json.dumps({"torch": torch, "requirements": list(requirements)})
    if complete.exists() and complete.read_text(encoding="utf-8") == wanted:
        return python
    print(f"{name}: setting up an environment in {home} (once; a few minutes)", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pinned = home / "constraints.txt"
    pinned.write_text(f"{torch}\n", encoding="utf-8")
    for packages in [[torch] if torch else [], list(requirements)]:
        if packages and subprocess.run([*install, "-c", str(pinned), *packages]).returncode:
            raise PeerError(f"{name}: {' '.join(packages)} could not be installed; see above")
    complete.write_text(wanted, encoding="utf-8")
    return python


class Worker:
    """A contestant's process; leave it with ``with``.

    Args:
        name: in messages and tables.
        script: in ``benchmarks/workers/``, or a path.
        setup: the script gets it as one JSON argument.
        python: of the contestant's environment; None for the one that runs this.
        environ: variables on top of the present ones.
        timeout_s: how long an answer may take.
    """

    def __init__(
        self,
        name: str,
        script: str | Path,
        setup: dict[str, Any] | None = None,
        *,
        python: Path | None = None,
        environ: dict[str, str] | None = None,
        timeout_s: float = 600,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        # No search path of ours in a peer's environment: it has its own torchtitan, torch and so on.
        variables = {k: v for k, v in os.environ.items() if python is None or k != "PYTHONPATH"}
        if python is None:
            variables["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [str(python or sys.executable), str(WORKERS / script), json.dumps(setup or {})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=variables | {"PYTHONUNBUFFERED": "1"} | (environ or {}),
        )

    def ask(self, question: str, **arguments: Any) -> Any:
        """Call the worker's function of that name.

        Raises:
            PeerError: if it raised, ended or took longer than the timeout, with what it printed last.
        """
        process = self._process
        late = threading.Timer(self._timeout_s, process.kill)
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                print(
                    json.dumps({"ask": question, "with": arguments}),
                    file=process.stdin,
                    flush=True,
                )
            line = process.stdout.readline() if process.stdout else ""
        finally:
            late.cancel()
        if not line:
            code = process.wait()
            raise PeerError(
                f"{self.name} ended with code {code} at {question!r}:\n{self.printed()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name} failed at {question!r}:\n{answer['error']}")
        return answer["value"]

    def printed(self, lines: int = 20) -> str:
        """The last lines that the worker printed."""
        file = self._errors.fileno()  # read in place: the worker writes on at the same offset
        size = os.fstat(file).st_size
        text = os.pread(file, size, 0).decode("utf-8", errors="replace")
        return "".join(text.splitlines(keepends=True)[-lines:])

    def kill(self) -> None:
        """End the process at once; an answer that is waited for does not come."""
        self._process.kill()

    def close(self) -> None:
        """End the process: politely, then not."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin and self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout and self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_turn(
    measures: dict[str, Callable[[], T]], *, rounds: int, warmup: int = 0
) -> dict[str, list[T]]:
    """Measure each once a round; the order turns by one from round to round, so that no one always follows the same one.

    Args:
        measures: by name; each returns what it measured.
        rounds: that count.
        warmup: rounds before them, which do not.
    """
    names = list(measures)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = measures[name]()
            if number >= warmup:
                found[name].append(value)
    return found


def assert_equal(values: dict[str, float], *, relative: float, what: str = "loss") -> None:
    """Refuse to compare contestants that do not compute the same.

    Args:
        values: by contestant; each is compared with the first.
        relative: greatest difference over the first value.
        what: the value is.

    Raises:
        SystemExit: naming all values, if one differs.
    """
    reference = next(iter(values.values()))
    # "not <=" rather than ">": a NaN differs
    if any(not abs(v - reference) <= relative * abs(reference) for v in values.values()):
        text = ", ".join(f"{name} {value:.8g}" for name, value in values.items())
        raise SystemExit(
            f"{what} differs by more than {relative:g} of it ({text}); nothing is compared"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Where measured values lie.

    Attributes:
        median: half are less.
        lower: a quarter is less.
        upper: a quarter is more.
        n: how many there are.
    """

    median: float
    lower: float
    upper: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.lower:.3f}-{self.upper:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of one value, that value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), lower, upper, len(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: of values that were measured in the same round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def machine() -> dict[str, Any]:
    """Date, hardware and load, for a result's head."""
    model, info = platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next(
            (line.partition(": ")[2] for line in lines if line[:10] == "model name"), model
        )
    return {
        "date": date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str]) -> str:
    """A Markdown table whose columns are also straight in a terminal."""
    cells = [[*map(str, row)] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in cells
    )


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result where it was asked for; spreads become objects."""
    if path:
        text = json.dumps(result, indent=2, default=asdict)
        path.write_text(text + "\n", encoding="utf-8")
