"""How full are packed rows, and how fast are they made, beside TRL's and torchtune's?

All get the same tokenised samples, in memory or as they keep them, and make the rows that training would get: token ids, labels
and positions of isolated documents, in batches. Ours are made by the whole loader in one process: offline packing writes its
result to disk and reads it again. TRL packs with its default, best-fit decreasing over 1,000 samples at a time, and its padding-free
collator makes the batches; torchtune is greedy in the order of the data, and is spared the attention mask of its collator.
Before anything is compared, all must have the same tokens and the same labels.

    python benchmarks/packing.py [--samples 20000] [--rounds 5] [--without torchtune] [--json FILE]

At the first use the peers are installed, each into an environment of its own.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import WORKERS, Worker, environment, in_turn, machine, ratios, spread, table, write_json

from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.sample import DroppedRow
from torchtitan.data.chat.source import Chat
from torchtitan.data.tokenizer import Tokenizer

sys.path.insert(0, str(WORKERS))
from samples import FIRST_ID, Samples

TRL = "trl", ["trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"]
TORCHTUNE = "torchtune", ["torchtune==0.6.1", "torchao==0.10.0"]
OFFLINE, STREAMING = "torchtitan, best fit", "torchtitan, streaming"
PEERS = {
    "TRL, bfd": ("pack_trl.py", TRL),
    "torchtune, greedy": ("pack_torchtune.py", TORCHTUNE),
}
SETS = {  # name: (median tokens of a sample, sigma of their logarithm)
    "short, as instructions are": (85, 0.7),
    "middling, as chats are": (330, 0.75),
    "long, as documents are": (900, 0.8),
}
"""Lengths are log-normal. Means are 108, 430 and 1,200 tokens, before those that do not fit into a row are left out."""
SEQ_LENS = (2048, 4096)
AIMS = {OFFLINE: 0.99, STREAMING: 0.97}


def made_up(name: str, n: int, seq_len: int) -> Samples:
    """``n`` samples of a set's lengths and of random ids; the first half of each is the question."""
    median, sigma = SETS[name]
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(median), sigma, 2 * n)).astype(np.int64).clip(8)
    lengths = lengths[lengths <= seq_len][:n]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(FIRST_ID, 4096, starts[-1], dtype=np.int32)
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return Samples(tokens, places >= np.repeat(lengths // 2, lengths), starts)


def embedded(seq_len: int) -> Samples:
    """Questions and answers of the running Python, as they are tokenised for training; special tokens are made ordinary."""
    encoder = ChatLoader.Config(sources=[]).encoder(Tokenizer.Config().build(), seq_len)
    source = Chat.Config(rows=Docstrings.Config()).open(encoder)
    if not isinstance(source, Chat):
        raise TypeError("the embedded questions can be read in any order")
    samples = []
    for index in range(len(source)):
        try:
            samples.append(source.sample(index))
        except DroppedRow:
            continue
    starts = np.cumsum([0, *map(len, samples)])
    tokens = np.concatenate([sample.tokens for sample in samples])
    return Samples(
        np.maximum(tokens, FIRST_ID), np.concatenate([s.learned for s in samples]), starts
    )


def measure(samples: Samples, seq_len: int, args: argparse.Namespace) -> dict[str, list[Any]]:
    """What each contestant answers in each round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "samples.npz"
        samples.save(path)
        setup = {"samples": str(path), "seq_len": seq_len, "rows": args.batch_rows}
        ours = stack.enter_context(Worker("torchtitan", "pack_torchtitan.py", setup))
        questions = {
            OFFLINE: partial(ours.ask, "offline"),
            STREAMING: partial(ours.ask, "streaming"),
        }
        for name, (script, (env, requirements)) in PEERS.items():
            if env not in args.without:
                python = environment(env, requirements)
                peer = stack.enter_context(Worker(name, script, setup, python=python))
                questions[name] = partial(peer.ask, "pack")
        answers = in_turn(questions, rounds=args.rounds, warmup=1)
    check_same(samples, {n: a[0] for n, a in answers.items() if n != STREAMING})
    return answers


def check_same(samples: Samples, answers: dict[str, dict[str, int]]) -> None:
    """Refuse to compare contestants that lose or change tokens.

    Raises:
        SystemExit: naming the contestant and the count.
    """
    expected = {
        "filled": len(samples.tokens),
        "learned": int(samples.learned.sum()),
        "token_sum": int(samples.tokens.sum(dtype=np.int64)),
        "label_sum": int(samples.tokens[samples.learned].sum(dtype=np.int64)),
    }
    for name, answer in answers.items():
        for count, value in expected.items():
            if answer[count] != value:
                raise SystemExit(f"{name}: {count} is {answer[count]}, not {value}; nothing is compared")  # fmt: skip


def utilisation(answer: dict[str, int], seq_len: int) -> float:
    """Share of the tokens of the rows that samples fill."""
    return answer["filled"] / (answer["n_rows"] * seq_len)


def main() -> None:
    """Measure, print tables and optionally write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000, help="of a set (default 20000)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--batch-rows", type=int, default=8, help="rows of a batch (default 8)")
    parser.add_argument("--without", action="append", default=[], help="trl or torchtune; may be repeated")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the results there too")
    args = parser.parse_args()
    result: dict[str, Any] = {**machine(), "samples": args.samples, "sets": {}}
    rounds, args.rounds = args.rounds, 1
    full = {}
    for seq_len in SEQ_LENS:
        sets = {name: made_up(name, args.samples, seq_len) for name in SETS}
        sets["questions about Python"] = embedded(seq_len)
        for name, samples in sets.items():
            answers = measure(samples, seq_len, args)
            full[name, seq_len] = {n: utilisation(a[0], seq_len) for n, a in answers.items()}
    names = list(next(iter(full.values())))
    print("tokens of rows that samples fill")
    print(table(
        [[set_name, s, *(f"{100 * found[n]:.2f} %" for n in names)] for (set_name, s), found in full.items()],
        header=["samples", "tokens of a row", *names],
    ))  # fmt: skip
    for (name, seq_len), found in full.items():
        result["sets"][f"{name}, {seq_len}"] = found
        missed = [f"{n} {100 * found[n]:.2f} %" for n, aim in AIMS.items() if found[n] < aim]
        if missed:
            print(f"below the aim with {name}, {seq_len}: {', '.join(missed)}")

    args.rounds, seq_len = rounds, SEQ_LENS[-1]
    samples = made_up("middling, as chats are", args.samples, seq_len)
    answers = measure(samples, seq_len, args)
    seconds = {n: [a["pack_s"] + a["rows_s"] for a in found] for n, found in answers.items()}
    cpu = {n: [a["pack_cpu_s"] + a["rows_cpu_s"] for a in found] for n, found in answers.items()}
    packing = {n: spread([a["pack_s"] for a in found]) for n, found in answers.items()}
    speeds = {n: spread([a["filled"] / s / 1e6 for a, s in zip(answers[n], seconds[n], strict=True)]) for n in answers}  # fmt: skip
    over = {n: spread(ratios(seconds[n], seconds[OFFLINE])) for n in answers}
    cpu_over = {n: spread(ratios(cpu[n], cpu[OFFLINE])) for n in answers}
    print(f"\nfrom samples to batches of {args.batch_rows} rows of {seq_len}, {len(samples.tokens)} tokens, {rounds} rounds")  # fmt: skip
    print(table(
        [[n, speeds[n], packing[n], over[n], cpu_over[n]] for n in answers],
        header=["contestant", "million tokens/s", "packing alone, s", "time over ours", "CPU time over ours"],
    ))  # fmt: skip
    result["speed"] = {
        n: {"million_tokens_per_s": speeds[n], "pack_s": packing[n], "time_over_offline": over[n], "cpu_over_offline": cpu_over[n]}
        for n in answers
    }  # fmt: skip
    write_json(args.json, result)


if __name__ == "__main__":
    main()
