"""What the step-speed contestants share: needs torch and safetensors alone."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from serving import Gate, cpu_s, peak_rss_gib, versions
from torch import Tensor, nn

Setup = dict[str, Any]
"""See `make_contest` in ``benchmarks/step_speed.py``."""


def read_setup() -> Setup:
    """What the benchmark asks for."""
    return json.loads(sys.argv[1])


def read_rows(setup: Setup) -> dict[str, Tensor]:
    """``tokens`` and ``labels`` of all steps, ``(N, B, S)``; a label is the token that follows, -100 at the end."""
    return load_file(Path(setup["folder"]) / "rows.safetensors")


def facts(*packages: str) -> dict[str, Any]:
    """What a contestant tells of itself: those with other threads or another torch are not compared."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "versions": versions(*packages),
        "peak_rss_gib": peak_rss_gib(),
        "cpu_s": cpu_s(),
    }


def gemm(shape: list[int], least_flops: float = 2e9) -> dict[str, float]:
    """Multiply float32 matrices, ``(M, K)`` by ``(K, N)``; how long it takes.

    Args:
        shape: M, K, N.
        least_flops: multiply again until it is so many.
    """
    m, k, n = shape
    a, b, out = torch.ones(m, k), torch.ones(k, n), torch.empty(m, n)
    count = -int(-least_flops // (2 * m * k * n))
    torch.mm(a, b, out=out)  # not timed: memory and threads are new
    start, cpu = time.perf_counter(), cpu_s()
    for _ in range(count):
        torch.mm(a, b, out=out)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_s": cpu_s() - cpu,
        "flops": 2.0 * m * k * n * count,
    }


def bare_loop(
    gate: Gate, setup: Setup, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Forward, backward, clip, update: what one writes without a trainer.

    Args:
        gate: before each step.
        setup: of the contest.
        model: to train.
        loss_of: mean loss of ``(B, S)`` tokens and labels.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": setup["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=setup["lr"],
        betas=tuple(setup["betas"]),
        eps=setup["eps"],
        fused=True,
    )
    rows, last = read_rows(setup), None
    for tokens, labels in zip(rows["tokens"], rows["labels"], strict=True):
        gate.wait(None if last is None else last.item)
        loss = loss_of(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), setup["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        last = loss.detach()
    gate.wait(None if last is None else last.item)
