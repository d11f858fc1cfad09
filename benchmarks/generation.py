"""Is generation faster than transformers.generate, with the same weights and the same tokens?

A Llama with random weights is written as a Hugging Face folder and loaded by both. Greedy tokens must be equal before anything is timed;
then both generate in turn, which of them first by turns, and each round gives one ratio, of time and of CPU time: on a machine that
others use too, the second with one thread is what says more.

    python benchmarks/generation.py [--batch 1 8] [--new-tokens 64] [--layers 12] [--dim 576] [--rounds 6] [--threads N] [--json FILE]

Needs the package transformers.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import open_source

GREEDY = Sampling.Config(temperature=0)


class _NoText:
    def decode(self, ids: Any) -> str:
        del ids
        return ""


def both(args: argparse.Namespace) -> tuple[Any, Generator]:
    """Their model, and ours with its weights."""
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.dim,
        intermediate_size=args.dim * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.dim // 64,
        num_key_value_heads=max(1, args.dim // 192),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        source = open_source(folder, device=torch.device("cpu"), tokenizer=Tokenizer.Config())
    return theirs, Generator(source.model, _NoText())


def prompts_of(n_rows: int, args: argparse.Namespace) -> list[list[int]]:
    """Random prompts; of a batch, of lengths that differ."""
    g = torch.Generator().manual_seed(1)
    lengths = [args.prompt_tokens - 3 * i for i in range(n_rows)]
    return [torch.randint(1, args.vocab, (max(1, n),), generator=g).tolist() for n in lengths]


def their_tokens(theirs: Any, prompts: list[list[int]], n_new: int) -> list[list[int]]:
    """Greedy, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask: Tensor = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        found = theirs.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=n_new, do_sample=False
        )
    return found[:, longest:].tolist()


def our_tokens(ours: Generator, prompts: list[list[int]], n_new: int) -> list[list[int]]:
    """Greedy."""
    return [c.ids for c in ours.generate(prompts, GREEDY, max_new_tokens=n_new)]


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def spread(ratios: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Compare, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=576, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    theirs, ours = both(args)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "rounds": {},
    }
    heads = ("ours", "transformers", "times as fast (range)", "in CPU time (range)")
    print(f"{'batch':>5}{heads[0]:>14}{heads[1]:>18}{heads[2]:>28}{heads[3]:>28}")
    for n_rows in args.batch:
        prompts = prompts_of(n_rows, args)
        if our_tokens(ours, prompts, 8) != their_tokens(theirs, prompts, 8):
            raise SystemExit(f"the tokens differ at batch {n_rows}")
        both_ways = [
            partial(our_tokens, ours, prompts, args.new_tokens),
            partial(their_tokens, theirs, prompts, args.new_tokens),
        ]
        rounds: list[list[tuple[float, float]]] = []
        for number in range(args.rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            taken = {i: timed(both_ways[i]) for i in order}
            rounds.append([taken[0], taken[1]])
        times, cpu_times = ([b[kind] / a[kind] for a, b in rounds] for kind in (0, 1))
        tokens = n_rows * args.new_tokens
        speeds = [tokens / statistics.median(r[side][0] for r in rounds) for side in (0, 1)]
        print(
            f"{n_rows:>5}{speeds[0]:>10.1f} t/s{speeds[1]:>14.1f} t/s{spread(times):>28}{spread(cpu_times):>28}"
        )
        result["rounds"][str(n_rows)] = rounds
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
