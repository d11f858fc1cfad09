"""How much memory and time does the loss take beside the dense computation?

For each way to compute the cross-entropy of a projection, with the gradients of states and weight: the memory that it adds at its
peak (high-water mark of the process, in a process of its own, Linux), and its time as a ratio to the dense one (all ways in one process,
in turn, median of the rounds with quartiles; of the clock, and of the CPU, which counts on a busy machine with --threads 1). Losses and gradients are compared before anything is measured. Liger-style is the
algorithm of Liger-Kernel (arXiv:2410.10989 section 3.2) in plain torch.

The aims at a vocabulary of 128,256: a sixth of the dense one's memory, at most 1.15 times its time.

    python -m benchmarks.linear_cross_entropy [--tokens 2048] [--dim 512] [--vocab 32768] [--masked 0.0] [--rounds 5] [--json FILE]
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.peers import machine, ratios, spread, table, write_json
from benchmarks.runs import forget_peak, status
from torchtitan.batch import IGNORE_INDEX
from torchtitan.ops.linear_cross_entropy import linear_cross_entropy

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNK_TOKENS = 256


def dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """All logits at once."""
    logits = (hidden @ weight.t()).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Chunks whose logits autograd keeps."""
    parts = zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True)
    return torch.stack([dense(h, weight, y) for h, y in parts]).sum()


def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Chunks whose logits are computed again in the backward."""
    parts = zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True)
    losses: list[Any] = [checkpoint(dense, h, weight, y, use_reentrant=False) for h, y in parts]
    return torch.stack(losses).sum()


def torchs_own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``torch.nn.functional.linear_cross_entropy``, with an explicit chunk."""
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=CHUNK_TOKENS, chunking_method=None
    )
    return F.linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE_INDEX, reduction="sum", options=options
    )


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        n_chunks = -(-len(weight) // hidden.shape[1])
        size = 1 << (-(-len(hidden) // n_chunks) - 1).bit_length()
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), size):
            some = slice(start, start + size)
            logits = (hidden[some] @ weight.t()).float()
            counts = labels[some] != IGNORE_INDEX
            target = labels[some].where(counts, 0)[:, None]
            log_norm = logits.logsumexp(1, keepdim=True)
            total += (log_norm - logits.gather(1, target)).squeeze(1).where(counts, 0).sum()
            logits.sub_(log_norm).exp_().scatter_add_(1, target, -torch.ones_like(log_norm))
            grad = logits.mul_(counts[:, None]).to(weight.dtype)
            grad_hidden[some] = grad @ weight
            grad_weight.addmm_(grad.t(), hidden[some])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad_outputs[0]), grad_weight.mul_(grad_outputs[0]), None


def ways() -> dict[str, Way]:
    """Those that this torch has, the dense one first."""
    found: dict[str, Way] = {
        "dense": dense,
        "chunked": chunked,
        "checkpointed": checkpointed,
        "Liger-style": _Liger.apply,
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["torch's own"] = torchs_own
    for how in ("float32", "weight_dtype", "by_vocabulary"):
        found[f"ours, {how}"] = partial(
            linear_cross_entropy, chunk_tokens=CHUNK_TOKENS, weight_gradient=how
        )
    return found


def problem(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight and labels."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.dim, generator=g)
    weight = torch.randn(args.vocab, args.dim, generator=g) / args.dim**0.5
    labels = torch.randint(args.vocab, (args.tokens,), generator=g)
    labels[torch.rand(args.tokens, generator=g) < args.masked] = IGNORE_INDEX
    dtype = getattr(torch, args.dtype)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def step(way: Way, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Loss and gradients."""
    loss = way(hidden, weight, labels)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def _measure(name: str, args: argparse.Namespace, pipe: Any) -> None:
    torch.set_num_threads(args.threads)
    inputs = problem(args)
    small = tuple(t[:64].detach().requires_grad_(t.is_floating_point()) for t in inputs)
    step(ways()[name], small[0], inputs[1], small[2])  # what is loaded and kept at the first call
    before = forget_peak()
    step(ways()[name], *inputs)
    pipe.send(status("VmHWM") - before)


def added_peak(name: str, args: argparse.Namespace) -> int:
    """Bytes that a way adds at its peak, its gradients included; in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_measure, args=(name, args, there))
    process.start()
    there.close()
    size = here.recv()
    process.join()
    return size


def times(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round by the clock and of CPU; all ways in turn, after they were compared with the dense one."""
    inputs = problem(args)
    want = step(dense, *inputs)
    limit = 1e-4 if args.dtype == "float32" else 3e-2
    for name, way in ways().items():
        for a, b in zip(step(way, *inputs), want, strict=True):
            difference = ((a.float() - b.float()).norm() / b.float().norm()).item()
            if difference > limit:
                raise SystemExit(f"{name} differs from the dense computation by {difference}")
    found: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in ways()} for kind in ("seconds", "cpu_s")
    }
    for _ in range(args.rounds):
        for name, way in ways().items():
            begin, cpu = time.perf_counter(), time.process_time()
            step(way, *inputs)
            found["seconds"][name].append(time.perf_counter() - begin)
            found["cpu_s"][name].append(time.process_time() - cpu)
    return found


def main() -> None:
    """Measure, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--masked", type=float, default=0.0, help="part of the labels ignored (0)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head = machine()
    taken = times(args)
    peaks = {name: added_peak(name, args) for name in ways()}
    gradients = (args.tokens + args.vocab) * args.dim * getattr(torch, args.dtype).itemsize
    print(
        f"{args.tokens} tokens, dim {args.dim}, vocabulary {args.vocab}, {args.dtype}, {args.masked:.0%} masked; "
        f"the gradients themselves are {gradients / 2**20:.0f} MiB"
    )
    rows = [
        (
            name,
            f"{peaks[name] / 2**20:.0f}",
            f"{peaks['dense'] / peaks[name]:.1f}x",
            *(str(spread(ratios(of[name], of["dense"]))) for of in taken.values()),
        )
        for name in peaks
    ]
    header = ("", "added peak, MiB", "dense / it", "time / dense (quartiles)", "CPU time / dense")
    print(table(rows, header=header))
    shown = {key: value for key, value in vars(args).items() if key != "json"}
    result = {"torch": torch.__version__, **shown, "peak_bytes": peaks, **taken}
    write_json(args.json, {**head, **result})


if __name__ == "__main__":
    main()
