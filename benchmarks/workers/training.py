"""A rank of a case whose steps and memory are measured, for ``benchmarks/suite.py``."""

import json
import sys
from typing import Any

import torch
from serving import serve

from benchmarks.runs import BareLoop, Run, Steps, peak_of_tensors, timed
from torchtitan.config import from_dict

setup = json.loads(sys.argv[1])


def measure(warmup: int, samples: int, steps: int) -> dict[str, Any]:
    """Build the run, take ``warmup`` steps, then time ``samples`` times ``steps`` of them; memory is that of all but the first."""
    config: Any = from_dict(setup["config"])
    run: Steps = BareLoop(config) if setup["bare"] else Run.of(setup)
    _, first_loss = timed(run, 1)
    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(run.device)
    timed(run, warmup - 1)
    seconds = [timed(run, steps)[0] for _ in range(samples)]
    found = {
        "first_loss": first_loss,
        "seconds": seconds,
        "peak_bytes": peak_of_tensors(run) if on_gpu or not config.compile.enabled else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(run.device) if on_gpu else 0,
    }
    if isinstance(run, Run):
        run.trainer.close()
    return found


serve({"measure": measure})
