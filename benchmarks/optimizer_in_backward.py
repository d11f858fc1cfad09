"""How much memory of gradients does the optimizer in the backward save?

The same run with updates after the backward and in it, on one rank (float32, without FSDP) and on two (FSDP2), each in
processes of its own. Counted: the storages of all gradients that are alive at any update, the most on a rank. Measured:
the resident memory that the steps add (high-water mark, Linux). The losses of both must be equal, bit for bit.

    python -m benchmarks.optimizer_in_backward [--dim 768] [--layers 16] [--steps 5] [--ranks 1 2] [--json FILE]
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import machine, table, write_json
from benchmarks.runs import Ranks, setup_of, without_files
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.trainer import Trainer
from torchtitan_recipes.models.llama3 import llama3_debugmodel

MIB = 2**20


def config_of(args: argparse.Namespace, ranks: int, *, in_backward: bool) -> Trainer.Config:
    """A run whose gradients are much larger than its activations."""
    config = without_files(llama3_debugmodel())
    heads = max(1, args.dim // 64)
    config.model = Decoder.Config(
        vocab_size=4096,
        dim=args.dim,
        n_layers=args.layers,
        attention=GQA.Config(n_heads=heads, n_kv_heads=heads),
        feed_forward=SwiGLU.Config(ffn_dim=args.dim * 8 // 3 // 64 * 64),
    )
    config.training.seq_len, config.training.global_batch_rows = 64, ranks
    config.training.clip_by, config.training.device = "parameter", "cpu"
    config.parallelism.reshard_after_forward = True
    config.optimizer.in_backward = in_backward
    return config


def measure(args: argparse.Namespace, ranks: int, *, in_backward: bool) -> dict[str, Any]:
    """What the rank that needs most answers."""
    config = config_of(args, ranks, in_backward=in_backward)
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks("gradients.py", setup_of(config, folder), ranks=ranks) as run,
    ):
        answers = run.ask("steps", number=args.steps)
    return {
        "ranks": ranks,
        "in_backward": in_backward,
        "losses": answers[0]["losses"],
        "seconds": answers[0]["seconds"][1:],
        **{key: max(a[key] for a in answers) for key in answers[0] if key.endswith("_bytes")},
    }


def pair(args: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """After the backward, and in it.

    Raises:
        SystemExit: if the losses differ.
    """
    found = [measure(args, ranks, in_backward=early) for early in (False, True)]
    after, early = (case["losses"] for case in found)
    if after != early:
        raise SystemExit(f"{ranks} ranks: the losses differ, {after} and {early}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args(argv)
    head = machine()
    cases = [case for ranks in args.ranks for case in pair(args, ranks)]
    rows = [
        (
            case["ranks"],
            "in the backward" if case["in_backward"] else "after it",
            f"{case['alive_bytes'] / MIB:.1f}",
            f"{case['all_bytes'] / case['alive_bytes']:.1f}x",
            f"{case['added_bytes'] / MIB:.0f}",
            f"{case['peak_bytes'] / MIB:.0f}",
        )
        for case in cases
    ]
    print(f"width {args.dim}, {args.layers} layers, float32; losses equal bit for bit")
    columns = (
        "ranks",
        "updates",
        "live gradients, MiB",
        "all / live",
        "resident, added by steps, MiB",
        "peak resident, MiB",
    )
    print(table(rows, header=columns))
    shown = {key: value for key, value in vars(args).items() if key != "json"}
    write_json(args.json, {**head, "torch": torch.__version__, **shown, "cases": cases})


if __name__ == "__main__":
    main()
