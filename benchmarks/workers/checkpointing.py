"""A rank of a run that saves and loads while it is measured, for ``benchmarks/checkpoint_stall.py``."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from serving import serve

from benchmarks.runs import Run, forget_peak, status, timed
from torchtitan.checkpoint import Checkpointer
from torchtitan.training.rng import rng_state

setup = json.loads(sys.argv[1])
run = Run.of(setup)
trainer = run.trainer
trainer.loader_state = trainer.loader.next().state  # which a checkpoint has
checkpointers: dict[str, Checkpointer] = {}
for kind in ("sync", "async"):
    config = dataclasses.replace(
        trainer.config.checkpoint, async_save=kind == "async", keep_latest=1
    )
    checkpointers[kind] = config.build(folder=Path(setup["folder"], kind))


def save(kind: str, steps: int) -> dict[str, float]:
    """Seconds: of a step before a save, of the save's call, that the next ``steps`` steps took longer, until it was complete.

    And the bytes that the process grew by at most.
    """
    trainer.checkpointer = checkpointers[kind]
    plain_s, _ = timed(run, steps)
    resident = forget_peak()
    dist.barrier()
    begin = time.perf_counter()
    trainer.save()
    stall_s = time.perf_counter() - begin
    during_s, _ = timed(run, steps)
    last = time.perf_counter()
    trainer.checkpointer.wait()
    end = time.perf_counter()
    return {
        "step_s": plain_s,
        "stall_s": stall_s,
        "slower_s": steps * (during_s - plain_s),
        "waited_s": end - last,
        "complete_s": (end if kind == "async" else begin + stall_s) - begin,
        "added_bytes": status("VmHWM") - resident,
    }


def load(path: str) -> dict[str, float]:
    """Seconds to verify a checkpoint and to load it into this run, and the bytes that the process grew by at most."""
    checkpointer, tensors = trainer.checkpointer, trainer._tensors()
    resident = forget_peak()
    dist.barrier()
    begin = time.perf_counter()
    found = checkpointer.resolve(path)
    verified = time.perf_counter()
    if found is None:
        raise FileNotFoundError(path)
    checkpointer.load(found, tensors, rng_state(run.device))
    return {
        "verify_s": verified - begin,
        "load_s": time.perf_counter() - verified,
        "added_bytes": status("VmHWM") - resident,
        "held_bytes": sum(getattr(t, "_local_tensor", t).nbytes for t in tensors.values()),
    }


def keep() -> str:
    """Save as the run is now; the checkpoint's path."""
    trainer.checkpointer = checkpointers["sync"]
    trainer.save()
    return str(trainer.checkpointer.latest())


def checksum() -> float:
    """Over all ranks: each tensor's elements, weighted by place, so that a misplaced shard shows."""
    total = 0.0
    for tensor in trainer._tensors().values():
        whole: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        flat = whole.double().flatten()
        total += (flat * (1 + torch.arange(len(flat)) % 1009)).sum().item()
    return total


serve({"save": save, "load": load, "keep": keep, "checksum": checksum})
trainer.close()
