"""What a device does at best: matrix products and copies, for ``benchmarks/suite.py``."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from serving import serve

from benchmarks.runs import wait_for

small: bool = json.loads(sys.argv[1])["small"]
device = torch.device("cpu" if small else "cuda")
GEMM_SIZES = (256, 512) if small else (2048, 4096, 8192)
COPY_BYTES = 2**24 if small else 2**30


def seconds(call: Callable[[], object], rounds: int = 5, calls: int = 4) -> float:
    """Median of ``rounds`` times ``calls`` calls, after as many that do not count."""
    found = []
    for _ in range(rounds + 1):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait_for(device)
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found[1:])


def gemm_tflops(size: int) -> float:
    """Of a square product in bfloat16."""
    a, b, out = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(3))
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def copy_gb_per_s() -> float:
    """Bytes read and written."""
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source)) / 1e9


def measure() -> dict[str, Any]:
    """See `Ceilings`."""
    free = 0 if small else torch.cuda.mem_get_info(device)[0]
    details = {f"gemm {size}": gemm_tflops(size) for size in GEMM_SIZES}
    return {
        "name": "cpu" if small else torch.cuda.get_device_name(device),
        "memory": free,
        "gemm_tflops": max(details.values()),
        "copy_gb_per_s": copy_gb_per_s(),
        "details": details,
    }


serve({"measure": measure})
