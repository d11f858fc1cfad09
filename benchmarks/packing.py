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
from typing import Any, Self

import numpy as np
from peers import WORKERS, Worker, environment, in_turn, machine, ratios, spread, table, write_json

from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.chat.loader import ChatLoader
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
    samples = [source.sample(index) for index in range(len(source))]
    tokens = np.concatenate([sample.tokens for sample in samples])
    learned = np.concatenate([sample.learned for sample in samples])
    return Samples(np.maximum(tokens, FIRST_ID), learned, np.cumsum([0, *map(len, samples)]))


class Contest:
    """The contestants' processes; leave it with ``with``.

    Args:
        without: names of peers' environments that are left out.
        n_rows: of a batch.
    """

    def __init__(self, without: list[str], n_rows: int) -> None:
        self._stack, self._n_rows = ExitStack(), n_rows
        ours = self._stack.enter_context(Worker("torchtitan", "pack_torchtitan.py"))
        self._workers = [ours]
        self._questions = {OFFLINE: partial(ours.ask, "offline"), STREAMING: partial(ours.ask, "streaming")}  # fmt: skip
        for name, (script, (env, requirements)) in PEERS.items():
            if env not in without:
                peer = self._stack.enter_context(
                    Worker(name, script, python=environment(env, requirements))
                )
                self._workers.append(peer)
                self._questions[name] = partial(peer.ask, "pack")
        self.versions = {worker.name: worker.ask("versions") for worker in self._workers}

    def measure(self, samples: Samples, seq_len: int, rounds: int = 1) -> dict[str, list[Any]]:
        """What each contestant answers in each round."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "samples.npz"
            samples.save(path)
            for worker in self._workers:
                worker.ask("load", path=str(path))
        questions = {
            name: partial(ask, seq_len=seq_len, n_rows=self._n_rows)
            for name, ask in self._questions.items()
        }
        answers = in_turn(questions, rounds=rounds, warmup=int(rounds > 1))
        check_same(samples, {n: a[0] for n, a in answers.items() if n != STREAMING})
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


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
    with Contest(args.without, args.batch_rows) as contest:
        result = {**machine(), "versions": contest.versions, "samples": args.samples}
        result["utilisation"] = tell_utilisation(contest, args.samples)
        result["speed"] = tell_speed(contest, args)
    write_json(args.json, result)


def tell_utilisation(contest: Contest, n_samples: int) -> dict[str, dict[str, float]]:
    """Measure how full rows are, for each set and length of a row; print it."""
    questions, found = embedded(max(SEQ_LENS)), {}
    for seq_len in SEQ_LENS:
        sets = {name: made_up(name, n_samples, seq_len) for name in SETS}
        for name, samples in {**sets, "questions about Python": questions}.items():
            answers = contest.measure(samples, seq_len)
            found[name, seq_len] = {n: utilisation(a[0], seq_len) for n, a in answers.items()}
    names = list(next(iter(found.values())))
    rows = [[*key, *(f"{100 * shares[n]:.2f} %" for n in names)] for key, shares in found.items()]
    print("tokens of rows that samples fill")
    print(table(rows, header=["samples", "tokens of a row", *names]))
    for (name, seq_len), shares in found.items():
        missed = [f"{n} {100 * shares[n]:.2f} %" for n, aim in AIMS.items() if shares[n] < aim]
        if missed:
            print(f"below the aim: {name}, {seq_len}: {', '.join(missed)}")
    return {f"{name}, {seq_len}": shares for (name, seq_len), shares in found.items()}


def tell_speed(contest: Contest, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure how fast rows are made; print it."""
    seq_len = SEQ_LENS[-1]
    samples = made_up("middling, as chats are", args.samples, seq_len)
    answers = contest.measure(samples, seq_len, args.rounds)
    seconds = {n: [a["pack_s"] + a["rows_s"] for a in found] for n, found in answers.items()}
    cpu = {n: [a["pack_cpu_s"] + a["rows_cpu_s"] for a in found] for n, found in answers.items()}
    result = {
        n: {
            "million_tokens_per_s": spread([a["filled"] / s / 1e6 for a, s in zip(found, seconds[n], strict=True)]),
            "pack_s": spread([a["pack_s"] for a in found]),
            "time_over_ours": spread(ratios(seconds[n], seconds[OFFLINE])),
            "cpu_time_over_ours": spread(ratios(cpu[n], cpu[OFFLINE])),
        }
        for n, found in answers.items()
    }  # fmt: skip
    print(
        f"\nfrom samples to batches of {args.batch_rows} rows of {seq_len}, {len(samples.tokens)} tokens, "
        f"{args.rounds} rounds"
    )
    header = ["contestant", "million tokens/s", "packing alone, s", "time over ours", "CPU time over ours"]  # fmt: skip
    print(table([[n, *spreads.values()] for n, spreads in result.items()], header=header))
    return result


if __name__ == "__main__":
    main()
