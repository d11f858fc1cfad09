"""How long does a checkpoint hold training up, and what does loading it on other numbers of ranks take?

Saves that the run waits for and saves that are written while it goes on, in turn in one run on gloo ranks. For each:
the call (a stall of every rank), how much longer the next steps take than those before, and the time until the checkpoint
is complete. Then the last one is verified and loaded by fresh runs on fewer ranks; a sum over all tensors, weighted by
place, must be that of the run that saved. Memory is what the processes grow by at most (Linux), the worst rank's.

    python -m benchmarks.checkpoint_stall [--ranks 4] [--load 4 2 1] [--dim 512] [--layers 12] [--rounds 5] [--json FILE]
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import in_turn, machine, ratios, spread, table, write_json
from benchmarks.runs import Ranks, setup_of, without_files
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.trainer import Trainer
from torchtitan_recipes.models.llama3 import llama3_debugmodel

MIB = 2**20
KINDS = ("sync", "async")
SECONDS = ("stall_s", "slower_s", "complete_s")


def config_of(args: argparse.Namespace) -> Trainer.Config:
    """The same run whatever the number of ranks."""
    config = without_files(llama3_debugmodel())
    heads = max(1, args.dim // 64)
    config.model = Decoder.Config(
        vocab_size=4096,
        dim=args.dim,
        n_layers=args.layers,
        attention=GQA.Config(n_heads=heads, n_kv_heads=heads),
        feed_forward=SwiGLU.Config(ffn_dim=args.dim * 8 // 3 // 64 * 64),
    )
    config.training.seq_len, config.training.global_batch_rows = 64, max(args.ranks, *args.load)
    config.training.device = "cpu"
    return config


def worst(answers: list[dict[str, float]]) -> dict[str, float]:
    """The largest number of all ranks, name by name."""
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def saves(run: Ranks, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What each save took, by kind."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    def save(kind: str) -> float:
        found[kind].append(worst(run.ask("save", kind=kind, steps=args.steps)))
        return found[kind][-1]["stall_s"]

    in_turn({kind: lambda kind=kind: save(kind) for kind in KINDS}, rounds=args.rounds, warmup=1)
    return {kind: values[1:] for kind, values in found.items()}


def loads(args: argparse.Namespace, path: str, checksum: float) -> list[dict[str, Any]]:
    """The checkpoint on each number of ranks.

    Raises:
        SystemExit: if what was loaded is not what was saved.
    """
    found = []
    for ranks in args.load:
        with (
            tempfile.TemporaryDirectory() as folder,
            Ranks("checkpointing.py", setup_of(config_of(args), folder), ranks=ranks) as run,
        ):
            before = run.ask("checksum")[0]
            answer = worst(run.ask("load", path=path))
            after = run.ask("checksum")[0]
        if after == before or abs(after - checksum) > 1e-9 * abs(checksum):
            raise SystemExit(f"{ranks} ranks loaded {after!r}, but {checksum!r} was saved")
        found.append({"ranks": ranks, **answer})
    return found


def tell(
    saved: dict[str, list[dict[str, float]]], loaded: list[dict[str, Any]], steps: int
) -> None:
    """Print both tables."""
    rows = [
        (
            kind,
            *(str(spread([save[name] for save in saved[kind]])) for name in ("step_s", *SECONDS)),
            f"{max(save['added_bytes'] for save in saved[kind]) / MIB:.0f}",
        )
        for kind in KINDS
    ]
    after = f"next {steps} steps longer by, s"
    header = ("save", "a step, s", "the call, s", after, "complete after, s", "memory, MiB")
    print(table(rows, header=header))
    lost = {kind: [s["stall_s"] + max(0, s["slower_s"]) for s in saved[kind]] for kind in KINDS}
    stalls = {kind: [save["stall_s"] for save in saved[kind]] for kind in KINDS}
    print(f"\nstall async / sync: {spread(ratios(stalls['async'], stalls['sync']))}")
    print(f"lost in all, async / sync: {spread(ratios(lost['async'], lost['sync']))}\n")
    rows = [
        (
            load["ranks"],
            f"{load['verify_s']:.2f}",
            f"{load['load_s']:.2f}",
            f"{load['held_bytes'] / MIB:.0f}",
            f"{load['added_bytes'] / MIB:.0f}",
        )
        for load in loaded
    ]
    header = ("ranks that load", "verify, s", "load, s", "a rank holds, MiB", "memory, MiB")
    print(table(rows, header=header))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print two tables and optionally write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="that save (4)")
    parser.add_argument("--load", type=int, nargs="+", default=[4, 2, 1], help="ranks that load")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="before and after each save (4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args(argv)
    head = machine()
    with tempfile.TemporaryDirectory() as folder:
        setup = setup_of(config_of(args), folder)
        with Ranks("checkpointing.py", setup, ranks=args.ranks) as run:
            saved = saves(run, args)
            path, checksum = run.ask("keep")[0], run.ask("checksum")[0]
        loaded = loads(args, path, checksum)
        size = sum(file.stat().st_size for file in Path(path).iterdir())
    print(f"checkpoint of {size / MIB:.0f} MiB, {args.ranks} ranks on gloo, {args.rounds} rounds")
    tell(saved, loaded, args.steps)
    shown = {key: value for key, value in vars(args).items() if key != "json"}
    result = {"torch": torch.__version__, **shown, "bytes": size, "saves": saved, "loads": loaded}
    write_json(args.json, {**head, **result})


if __name__ == "__main__":
    main()
