"""How do step time and memory grow with sequence length, layers, batch and ranks?

Time is measured: steps of one run for each value, in turn, on one thread of this machine, in seconds of the CPU (what
others do on it counts little). Memory is that of a rank: counted on fake
tensors and fake ranks (`torchtitan.planner.verify.track`), beside the planner's closed form. For each axis a line is
fitted (what one more costs, and what is there without), and a power law (its exponent: 1 is proportional, 0 constant),
over all values and over the last two, where what does not grow weighs least. Ranks have a row each and share the model: the
line is in 1 / ranks (what is shared, and what each has). Fake ranks take no time, so none is given.

    python -m benchmarks.growth [--axes seq_len layers rows ranks] [--rounds 7] [--recompute none] [--json FILE]
"""

import argparse
import contextlib
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import Spread, in_turn, machine, spread, table, write_json
from benchmarks.runs import Run, without_files
from torchtitan.planner.verify import plan_tracked, track
from torchtitan.planner.work import work_of
from torchtitan.trainer import Trainer
from torchtitan_recipes.models.llama3 import llama3_debugmodel

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows.

    Attributes:
        unit: of the line's slope, in words.
        values: small to large.
        apply: sets one in a config.
        timed: whether steps can be measured; ranks cannot, and share the model.
    """

    unit: str
    values: Sequence[int]
    apply: Callable[[Trainer.Config, int], None]
    timed: bool = True


def _seq_len(config: Trainer.Config, value: int) -> None:
    config.training.seq_len = value


def _layers(config: Trainer.Config, value: int) -> None:
    model: Any = config.model
    model.n_layers = value


def _rows(config: Trainer.Config, value: int) -> None:
    config.training.global_batch_rows = value


AXES = {
    "seq_len": Axis("per 1,024 tokens of a row", (128, 256, 512, 1024, 2048), _seq_len),
    "layers": Axis("per layer", (2, 4, 8, 16), _layers),
    "rows": Axis("per row", (1, 2, 4, 8), _rows),
    "ranks": Axis("/ ranks", (2, 4, 8, 16, 32, 64), _rows, timed=False),
}
PER = {"seq_len": 1024}
"""Steps of an axis in the unit of its slope."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a quantity grows.

    Attributes:
        slope: of the line, a unit; on ranks that of 1 / ranks.
        intercept: of the line: what does not change.
        exponent: of the power law over all values.
        last: the same between the last two.
    """

    slope: float
    intercept: float
    exponent: float
    last: float


def fit(values: Sequence[float], found: Sequence[float], *, shared: bool = False) -> Fit:
    """Least squares: of the values (or of 1 / value, where they share) for the line, of the logarithms for the power law."""
    along = [1 / value for value in values] if shared else values
    slope, intercept = statistics.linear_regression(along, found)
    logs = [math.log(v) for v in values], [math.log(f) for f in found]
    exponent = statistics.linear_regression(*logs).slope
    last = (logs[1][-1] - logs[1][-2]) / (logs[0][-1] - logs[0][-2])
    return Fit(slope, intercept, exponent, last)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of an axis.

    Attributes:
        value: of the axis.
        flops: of a step on a rank, computed again included.
        counted: bytes of a rank, tracked.
        planned: the same by the closed form.
        seconds: of the CPU for a step; None where it is not measured.
    """

    value: int
    flops: float
    counted: int
    planned: int
    seconds: Spread | None = None


def config_of(axis: Axis, value: int, recompute: Any) -> Trainer.Config:
    """The debug model on one rank with one row of 256 tokens, but for ``value``."""
    config = without_files(llama3_debugmodel())
    config.training.seq_len, config.training.global_batch_rows = 256, 1
    config.training.compute_dtype, config.training.device = "float32", "cpu"
    config.parallelism.reshard_after_forward = True
    config.activation_checkpointing.mode = recompute
    axis.apply(config, value)
    return config


def cpu_s(run: Run) -> float:
    """CPU seconds of a step."""
    rows = run.rows()
    begin = time.process_time()
    run.step(rows)
    return time.process_time() - begin


def times(configs: dict[int, Trainer.Config], rounds: int) -> dict[int, Spread]:
    """CPU seconds of a step for each value, in turn in one process and thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        runs: dict[int, Run] = {}
        for value, config in configs.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            runs[value] = Run(copy.deepcopy(config), folder)
        measures = {
            str(value): lambda run=run: statistics.median(cpu_s(run) for _ in range(3))
            for value, run in runs.items()
        }
        found = in_turn(measures, rounds=rounds, warmup=1)
        for run in reversed(runs.values()):
            run.trainer.close()
    torch.set_num_threads(threads)
    return {int(value): spread(seconds) for value, seconds in found.items()}


def points(axis: Axis, args: argparse.Namespace) -> list[Point]:
    """Each value of an axis, measured, counted and planned."""
    configs = {value: config_of(axis, value, args.recompute) for value in axis.values}
    seconds = times(configs, args.rounds) if axis.timed else {}
    found = []
    for value, config in configs.items():
        ranks = 1 if axis.timed else value
        work = work_of(config, ranks)
        found.append(
            Point(
                value,
                work.flops + work.recomputed_flops,
                max(track(config, ranks).values()),
                plan_tracked(config, ranks),
                seconds.get(value),
            )
        )
    return found


def fits(name: str, found: Sequence[Point]) -> dict[str, Fit]:
    """How time, FLOPs and memory grow along an axis."""
    values = [point.value / PER.get(name, 1) for point in found]
    quantities: dict[str, list[float]] = {
        "seconds": [point.seconds.median for point in found if point.seconds],
        "flops": [point.flops for point in found],
        "counted": [point.counted for point in found],
        "planned": [point.planned for point in found],
    }
    return {
        what: fit(values, ys, shared=not AXES[name].timed)
        for what, ys in quantities.items()
        if len(ys) == len(values)
    }


def tell(name: str, axis: Axis, found: Sequence[Point]) -> None:
    """Print the points of an axis and how they grow."""
    rows = [
        (
            f"{point.value:,}",
            str(point.seconds) if point.seconds else "not measured",
            f"{point.flops / 1e9:.1f}",
            f"{point.counted / MIB:.1f}",
            f"{point.planned / MIB:.1f}",
            f"{100 * (point.planned / point.counted - 1):+.1f} %",
        )
        for point in found
    ]
    header = (
        name,
        "step, CPU s (quartiles)",
        "GFLOP",
        "counted, MiB",
        "planned, MiB",
        "difference",
    )
    print(table(rows, header=header) + "\n")
    units = {"seconds": ("CPU s", 1), "flops": ("GFLOP", 1e9)}
    rows = []
    for what, grown in fits(name, found).items():
        unit, size = units.get(what, ("MiB", MIB))
        line = f"{grown.slope / size:.3g} {axis.unit} + {grown.intercept / size:.3g}"
        rows.append(
            (
                f"{what}, {unit}" if what != "seconds" else f"step, {unit}",
                line,
                f"{grown.exponent:.2f}",
                f"{grown.last:.2f}",
            )
        )
    print(table(rows, header=(f"by {name}", "line", "exponent", "of the last two")) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print two tables an axis and optionally write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recompute", default="none", choices=("none", "full"))
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args(argv)
    head = machine()
    print(f"llama3 debug, float32 on the CPU, activation checkpointing {args.recompute}\n")
    result: dict[str, Any] = {}
    for name in args.axes:
        found = points(AXES[name], args)
        tell(name, AXES[name], found)
        result[name] = {"points": [asdict(point) for point in found], "fits": fits(name, found)}
    shown = {key: value for key, value in vars(args).items() if key != "json"}
    write_json(args.json, {**head, "torch": torch.__version__, **shown, "axes": result})


if __name__ == "__main__":
    main()
