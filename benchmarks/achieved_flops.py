"""What share of the machine's matrix-multiplication rate does a training step reach, measured in the same seconds?

The Trainer stops between its steps; there the same process multiplies matrices: large square ones, the best that the machine
can, and ones of the model's own shape (tokens x dim by dim x ffn_dim). A step's rate is the model's FLOPs for its tokens over the
whole time of the step, data and update included, beside the mean of the rates just before and just after it.

    python -m benchmarks.achieved_flops [--dim 256 768] [--layers 4] [--rounds 20] [--compile] [--json FILE]
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers import Worker, machine, ratios, spread, table, write_json
from benchmarks.step_speed import CHECKED_STEPS, add_sizes, make_contest

SQUARE = 2048


def measure(dim: int, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one model between multiplications.

    Args:
        dim: of the model.
        args: the other sizes.

    Returns:
        FLOP/s of the steps and of the multiplications, and their ratios, by wall time and by CPU time.
    """
    args.dim = dim
    environ = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    with tempfile.TemporaryDirectory() as folder:
        setup = make_contest(Path(folder), args)
        tokens = args.rows * args.seq_len
        shapes = {"square": [SQUARE] * 3, "own": [tokens, dim, setup["model"]["intermediate_size"]]}
        with Worker("ours", "torchtitan_step.py", setup, environ=environ) as worker:
            for _ in range(CHECKED_STEPS + args.warmup):
                worker.ask("step")
                probes = [{name: worker.ask("gemm", shape=s) for name, s in shapes.items()}]
            steps = []
            for _ in range(args.rounds):
                steps.append(worker.ask("step"))
                probes.append({name: worker.ask("gemm", shape=s) for name, s in shapes.items()})
            facts = worker.ask("facts")
    flops = setup["flops_per_token"] * tokens
    result: dict[str, Any] = {"dim": dim, "n_params": setup["n_params"], "shapes": shapes, **facts}
    for clock in ("seconds", "cpu_s"):
        rates = [flops / step[clock] for step in steps]
        result[f"step_gflops_by_{clock}"] = spread([rate / 1e9 for rate in rates])
        for name in shapes:
            gemm = [probe[name]["flops"] / probe[name][clock] for probe in probes]
            around = [(a + b) / 2 for a, b in pairwise(gemm)]
            result[f"{name}_gflops_by_{clock}"] = spread([rate / 1e9 for rate in gemm])
            result[f"share_of_{name}_by_{clock}"] = spread(ratios(rates, around))
    return result


def main() -> None:
    """Measure, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dim", type=int, nargs="+", default=[256, 768], help="multiples of 128")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps (default 20)")
    add_sizes(parser)
    args = parser.parse_args()
    head, rows, results = machine(), [], []
    for dim in args.dim:
        found = measure(dim, args)
        results.append(found)
        rows += [
            [
                f"{found['n_params'] / 1e6:.1f}M, dim {dim}",
                "wall" if clock == "seconds" else "CPU",
                *(
                    f"{found[f'{what}_gflops_by_{clock}'].median:.1f}"
                    for what in ("step", "square", "own")
                ),
                *(found[f"share_of_{what}_by_{clock}"] for what in ("square", "own")),
            ]
            for clock in ("seconds", "cpu_s")
        ]
    print(
        f"{args.rows} rows of {args.seq_len} tokens, float32, {results[0]['threads']} threads"
        f"{', compiled' if args.compile else ''}; {head}"
    )
    header = ["model", "time", "step GFLOP/s", f"GEMM {SQUARE}^3", "GEMM of its shape"]
    print(table(rows, header=[*header, f"share of {SQUARE}^3", "share of its shape"]))
    write_json(args.json, {**head, "rounds": args.rounds, "results": results})


if __name__ == "__main__":
    main()
