"""What does the Trainer's step cost over a bare PyTorch loop?

Both train the same model from the same weights on the same batches. The bare loop is what one writes by hand: forward,
the same fused loss, backward, clip, fused AdamW. Steps are timed in interleaved pairs, since machines are noisy, and
the losses of the two are compared over the untimed first steps. The Trainer's side is its whole step: drawing, global
counts, guard, clipping, schedule and the record for the metrics.

    python benchmarks/step_overhead.py [--pairs 40] [--json FILE]
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch

from torchtitan.batch import IGNORE_INDEX, Batch
from torchtitan.trainer import Trainer
from torchtitan.training.feed import Feed
from torchtitan_recipes.models.llama3 import llama3_debugmodel


def bare_loop(trainer: Trainer) -> Callable[[Batch], float]:
    """A hand-written step over a copy of the trainer's model."""
    model = trainer.config.model.build()
    policy = trainer.models["policy"]
    model.load_state_dict({n: p.detach() for n, p in policy.model.named_parameters()})
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    step_number = 0

    def step(batch: Batch) -> float:
        nonlocal step_number
        lr = trainer.config.optimizer.lr * policy.schedule.factor(step_number)
        for group in optimizer.param_groups:
            group["lr"] = lr
        step_number += 1
        hidden = model(batch["tokens"], batch["positions"], batch["document_ids"])
        count = (batch["labels"] != IGNORE_INDEX).sum()
        loss = model.head(hidden, batch["labels"]) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def trainers_step(trainer: Trainer, steps: int) -> Iterator[float]:
    """One whole step of the trainer each time it is asked for the next."""
    feed = Feed(trainer.loader, trainer.mesh, trainer.micro_batch_rows, trainer.stop)
    for fed in feed.steps(steps):
        metrics = trainer.train_step(fed.microbatches)
        trainer.metrics.record(
            trainer.step,
            {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": metrics.lr},
        )
        yield metrics.loss.item()


def main() -> None:
    """Measure, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="timed pairs of steps (default 40)")
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    warmup = 3
    with tempfile.TemporaryDirectory() as folder:
        config = llama3_debugmodel()
        config.folder = folder
        config.training.steps = args.pairs + warmup
        config.metrics.every_n_steps = 10_000
        config.metrics.plots.enabled = False
        trainer = config.build()
        bare = bare_loop(trainer)
        batches = trainer._open_loader(config.data)
        ours = trainers_step(trainer, args.pairs + warmup)
        times: dict[str, list[float]] = {"bare": [], "trainer": []}
        for pair in range(args.pairs + warmup):
            losses = {}
            for name in ("bare", "trainer") if pair % 2 else ("trainer", "bare"):
                start = time.perf_counter()
                losses[name] = bare(batches.next().batch) if name == "bare" else next(ours)
                times[name].append(time.perf_counter() - start)
            difference = abs(losses["bare"] - losses["trainer"]) / losses["bare"]
            if pair < warmup and difference > 1e-5:  # later AdamW amplifies rounding
                raise SystemExit(f"pair {pair}: the losses differ, {losses}; nothing is compared")
        batches.close()
        trainer.close()
    ratios = [t / b for b, t in zip(times["bare"], times["trainer"], strict=True)][warmup:]
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "pairs": len(ratios),
        "bare_s": statistics.median(times["bare"][warmup:]),
        "trainer_s": statistics.median(times["trainer"][warmup:]),
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
    }
    print("step time of the Trainer over that of a bare loop, interleaved pairs")
    for name, value in result.items():
        print(f"  {name:<16} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
