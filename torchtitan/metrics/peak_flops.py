"""Peak matrix throughput of known GPUs: the denominator of MFU, never guessed."""

import re

import torch

# Dense TFLOP/s of one device with fp32 accumulation, from the vendors' data sheets (a sheet's "with sparsity" halved).
# name as the driver gives it: (bf16 and fp16, fp8, tf32, fp32 without tensor cores); None = not offered
_PEAK_TFLOPS: list[tuple[str, tuple[float, float | None, float | None, float]]] = [
    (r"NVIDIA A100[- ].*", (312.0, None, 156.0, 19.5)),
    (r"NVIDIA A10", (125.0, None, 62.5, 31.2)),
    (r"NVIDIA L4", (121.0, 242.5, 60.0, 30.3)),
    (r"NVIDIA L40S", (362.05, 733.0, 183.0, 91.6)),
    (r"NVIDIA H100 PCIe", (756.5, 1513.0, 378.0, 51.0)),
    (r"NVIDIA H100 NVL", (835.5, 1670.5, 417.5, 60.0)),
    (r"NVIDIA H100 (SXM.*|\d+GB HBM3)", (989.5, 1979.0, 494.7, 67.0)),
    (r"NVIDIA H200 NVL", (835.5, 1670.5, 417.5, 60.0)),
    (r"NVIDIA H200( SXM.*)?", (989.5, 1979.0, 494.7, 67.0)),
    (r"NVIDIA GH200 .*", (989.5, 1979.0, 494.7, 67.0)),
    (r"NVIDIA B200", (2250.0, 4500.0, 1100.0, 75.0)),
    (r"NVIDIA GB200", (2500.0, 5000.0, 1250.0, 80.0)),
    (r"(NVIDIA )?GeForce RTX 3090", (71.0, None, 35.6, 35.6)),
    (r"(NVIDIA )?GeForce RTX 4090", (165.2, 330.3, 82.6, 82.6)),
    (r"(NVIDIA )?GeForce RTX 5090", (209.5, 419.0, 104.8, 104.8)),
    (r"AMD Instinct MI300X.*", (1307.4, 2614.9, 653.7, 163.4)),
    (r"AMD Instinct MI325X.*", (1307.4, 2614.9, 653.7, 163.4)),
]
_COLUMN = {"bf16": 0, "bfloat16": 0, "fp16": 0, "float16": 0, "fp8": 1, "float8": 1, "tf32": 2}
_COLUMN |= {"fp32": 3, "float32": 3}


def peak_tflops(device_name: str, compute_dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s, or None if it is not known.

    A fraction of a GPU (MIG), a laptop's or a cut-down part is not known, whatever it is called after.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` gives it.
        compute_dtype: a torch name or its short form; every float8 format counts as ``"float8"``. ``"float32"``
            means TF32 where this process allows it for matrix products.
    """
    dtype = compute_dtype.removeprefix("torch.")
    dtype = "float8" if dtype.startswith("float8") else dtype
    if dtype in ("float32", "fp32") and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = "tf32"
    if dtype not in _COLUMN or "MIG" in device_name:
        return None
    for pattern, peaks in _PEAK_TFLOPS:
        if re.fullmatch(pattern, device_name):
            return peaks[_COLUMN[dtype]]
    return None
