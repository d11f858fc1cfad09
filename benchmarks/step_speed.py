"""How fast is a step, beside a bare PyTorch loop, the Trainer of transformers and torchtune's single-device recipe?

All train the same Llama from the same Hugging Face folder on the same token ids, each in a process of its own, and are asked for a
step in turn. The losses of the first steps must be equal before anything is timed. Our Trainer gets text, which it tokenizes while
it trains; the others get token ids. A time is that of the whole body of a contestant's loop, data and logging included.

    python -m benchmarks.step_speed [--rounds 40] [--without torchtune] [--compile] [--json FILE]

At the first use the peers are installed, each into an environment of its own.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.peers import (
    Worker,
    assert_equal,
    environment,
    in_turn,
    machine,
    ratios,
    spread,
    table,
    write_json,
)
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.export import Target, export
from torchtitan.checkpoint.hugging_face.weights import LiveWeights
from torchtitan.data.embedded import Embedded
from torchtitan.data.files import Files
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import BUNDLED, Tokenizer
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.init import init_weights
from torchtitan.models.llama3.sizes import llama3

Environment = tuple[str, list[str]]
"""Name and requirements."""

HF: Environment = "hf_trainer", ["transformers==5.24.0", "accelerate==1.15.0"]
TORCHTUNE: Environment = "torchtune", ["torchtune==0.6.1", "torchao==0.10.0"]
PEERS = {  # contestant: script, environment
    "transformers, bare loop": ("bare_transformers_step.py", HF),
    "transformers, Trainer": ("hf_trainer_step.py", HF),
    "torchtune, recipe": ("torchtune_step.py", TORCHTUNE),
}
OURS, BARE = "torchtitan, Trainer", "torchtitan, bare loop"
CHECKED_STEPS = 3
FIRST_LOSS, LATER_LOSSES = 1e-4, 1e-3
"""Relative; later ones differ more, since AdamW amplifies rounding and torchtune decays norm weights too."""


def make_contest(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write what all train: a model's folder, documents that fill a row each, and their token ids.

    Args:
        folder: to write into.
        args: sizes.

    Returns:
        The setup of the workers.
    """
    config = llama3("debug")
    config.n_layers, config.dim = args.layers, args.dim
    config.attention = GQA.Config(n_heads=args.dim // 64, n_kv_heads=args.dim // 128)
    config.feed_forward = SwiGLU.Config(ffn_dim=args.dim * 11 // 4)
    model = config.build()
    init_weights(model, seed=0)
    counts = model.parameter_counts()
    target = Target(folder=folder / "model", dtype="float32", tokenizer=BUNDLED)
    export(LiveWeights(model), config, target, Agreement())
    steps = CHECKED_STEPS + args.warmup + args.rounds + 1  # a step is done when the next one begins
    tokenizer = Tokenizer.Config().build()
    documents = folder / "documents.jsonl"
    with documents.open("w", encoding="utf-8") as file:
        for text in texts_of_length(tokenizer, args.seq_len, args.rows * (steps + 1)):
            file.write(json.dumps({"text": text}) + "\n")
    loader = Loader.Config(
        sources=[Files.Config(path=str(documents))], shuffle=False, n_workers=0
    ).build(
        tokenizer=tokenizer,
        seq_len=args.seq_len,
        global_batch_rows=args.rows,
        dp_rank=0,
        dp_world_size=1,
        seed=0,
    )
    batches = [loader.next().batch for _ in range(steps)]
    loader.close()
    if any(bool(batch["document_ids"].any()) for batch in batches):
        raise RuntimeError("a row has two documents: the others would let them see each other")
    rows = {name: torch.stack([b[name] for b in batches]) for name in ("tokens", "labels")}
    save_file(rows, folder / "rows.safetensors")
    return {
        "folder": str(folder),
        "steps": steps,
        "rows": args.rows,
        "seq_len": args.seq_len,
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "compile": args.compile,
        "n_params": counts.total,
        "flops_per_token": model.flops_per_token(args.seq_len),
        "model": json.loads((folder / "model" / "config.json").read_text(encoding="utf-8")),
    }


def texts_of_length(tokenizer: Tokenizer, seq_len: int, count: int) -> list[str]:
    """Pieces of the running Python's own text that are ``seq_len`` tokens with what stands around a document."""
    source, found = Embedded.Config().build(), []
    n_tokens = seq_len - 1 - (tokenizer.bos_id is not None)
    for index in range(len(source)):
        ids = tokenizer.encode(source.read(index))
        for start in range(0, len(ids) - n_tokens, n_tokens):
            text = tokenizer.decode(ids[start : start + n_tokens])
            if len(tokenizer.encode(text)) == n_tokens and text.strip():
                found.append(text)
            if len(found) == count:
                return found
    raise SystemExit(f"only {len(found)} of {count} rows of {seq_len} tokens; lower --rounds")


def contest(
    contestants: dict[str, Callable[[], Worker]], args: argparse.Namespace
) -> dict[str, Any]:
    """Compare the first losses, then time.

    Args:
        contestants: start them.
        args: rounds.

    Returns:
        Of each contestant what it tells of itself, and the seconds and CPU seconds of its steps.
    """
    with ExitStack() as stack:
        workers = {name: stack.enter_context(start()) for name, start in contestants.items()}
        for number in range(CHECKED_STEPS):
            losses = {name: worker.ask("step")["loss"] for name, worker in workers.items()}
            print(f"step {number + 1}:", ", ".join(f"{n} {v:.6f}" for n, v in losses.items()))
            assert_equal(losses, relative=LATER_LOSSES if number else FIRST_LOSS)
        steps = in_turn(
            {name: partial(worker.ask, "step") for name, worker in workers.items()},
            rounds=args.rounds,
            warmup=args.warmup,
        )
        facts = {name: worker.ask("facts") for name, worker in workers.items()}
    for key in ("torch", "threads"):
        if len({fact[key] for fact in facts.values()}) > 1:
            raise SystemExit(f"contestants differ in {key}: {facts}; nothing is compared")
    return {
        name: facts[name] | {key: [step[key] for step in taken] for key in ("seconds", "cpu_s")}
        for name, taken in steps.items()
    }


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `make_contest` reads, but for ``--dim`` and ``--rounds``."""
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--threads", type=int, help="of each process; the default is torch's")
    parser.add_argument("--compile", action="store_true", help="each compiles as it does")
    parser.add_argument("--json", type=Path, help="write the result there too")


def main() -> None:
    """Measure, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each (default 40)")
    parser.add_argument("--dim", type=int, default=256, help="a multiple of 128")
    parser.add_argument(
        "--without", nargs="*", default=[], help="words of contestants to leave out"
    )
    add_sizes(parser)
    args = parser.parse_args()
    head = machine()
    environ = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        setup = make_contest(Path(name), args)
        contestants: dict[str, Callable[[], Worker]] = {
            OURS: partial(Worker, OURS, "torchtitan_step.py", setup, environ=environ),
            BARE: partial(Worker, BARE, "bare_step.py", setup, environ=environ),
        }
        for peer, (script, (env, requirements)) in PEERS.items():
            if not any(word in peer for word in args.without):
                python = environment(env, requirements)
                contestants[peer] = partial(
                    Worker, peer, script, setup, python=python, environ=environ
                )
        found = contest(contestants, args)
    ours, tokens = found[OURS], args.rows * args.seq_len
    rows = []
    for name, measured in found.items():
        measured["tokens_per_s"] = spread([tokens / t for t in measured["seconds"]])
        for key in ("seconds", "cpu_s"):
            measured[f"{key}_over_ours"] = spread(ratios(measured[key], ours[key]))
        rows.append(
            [
                name,
                f"{measured['tokens_per_s'].median:.0f}",
                measured["seconds_over_ours"],
                measured["cpu_s_over_ours"],
                f"{measured['peak_rss_gib']:.2f}",
            ]
        )
    print(
        f"\n{setup['n_params'] / 1e6:.1f}M parameters, float32, {args.rows} rows of {args.seq_len} tokens, {args.rounds} rounds, "
        f"{ours['threads']} threads{', compiled' if args.compile else ''}; {head}"
    )
    header = ["contestant", "tokens/s", "step over ours", "CPU time over ours", "peak RSS GiB"]
    print(table(rows, header=header))
    result = {**head, "setup": {k: v for k, v in setup.items() if k != "folder"}}
    write_json(args.json, result | {"rounds": args.rounds, "contestants": found})


if __name__ == "__main__":
    main()
