"""What a device has: memory, and the rates that bound a step."""

import re
from dataclasses import dataclass

from torchtitan.config.suggest import did_you_mean
from torchtitan.errors import ConfigError
from torchtitan.metrics.peak_flops import peak_tflops

GIB = 2**30
NODE_RANKS = 8
"""Devices of one machine, which talk over the device's own links."""
NETWORK_GB_PER_S = 50.0
"""Between machines, for each device and direction: one 400 Gbit/s adapter."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, or just an amount of memory.

    Attributes:
        name: as the user writes it.
        memory: usable bytes, as the driver reports them.
        peak_tflops: dense bf16 TFLOP/s; None if it is not known.
        memory_tb_per_s: TB/s of its memory; None if not known.
        link_gb_per_s: GB/s to its neighbours in one direction; None if not known.
    """

    name: str
    memory: int
    peak_tflops: float | None = None
    memory_tb_per_s: float | None = None
    link_gb_per_s: float | None = None


# name: (usable GiB, name of the driver for the table of peaks, TB/s of memory, GB/s of links)
_KNOWN: dict[str, tuple[float, str, float, float]] = {
    "H100-80GB": (79.1, "NVIDIA H100 80GB HBM3", 3.35, 450),
    "H100-PCIe": (79.1, "NVIDIA H100 PCIe", 2.0, 64),
    "H200": (139.8, "NVIDIA H200", 4.8, 450),
    "A100-80GB": (79.1, "NVIDIA A100-SXM4-80GB", 2.04, 300),
    "A100-40GB": (39.4, "NVIDIA A100-SXM4-40GB", 1.555, 300),
    "B200": (178.3, "NVIDIA B200", 8.0, 900),
    "MI300X": (191.5, "AMD Instinct MI300X", 5.3, 448),
    "L40S": (44.4, "NVIDIA L40S", 0.864, 32),
    "RTX5090": (31.4, "NVIDIA GeForce RTX 5090", 1.79, 64),
    "RTX4090": (23.6, "NVIDIA GeForce RTX 4090", 1.008, 32),
    "RTX3090": (23.6, "NVIDIA GeForce RTX 3090", 0.936, 32),
    "A10": (22.1, "NVIDIA A10", 0.6, 32),
    "L4": (22.0, "NVIDIA L4", 0.3, 32),
}
_UNITS = {"": 1, "B": 1, "GB": 10**9, "GIB": GIB, "MB": 10**6, "MIB": 2**20}


def find_device(text: str) -> Device:
    """The device that ``text`` names (``H100-80GB``, ``rtx 4090``), or an amount of memory (``24GiB``, ``80GB``, bytes).

    Raises:
        ConfigError: if it is neither.
    """
    names = {_plain(name): name for name in _KNOWN} | {"H100": "H100-80GB", "A100": "A100-80GB"}
    if _plain(text) in names:
        name = names[_plain(text)]
        gib, driver_name, memory_tb_per_s, link = _KNOWN[name]
        return Device(
            name, int(gib * GIB), peak_tflops(driver_name, "bfloat16"), memory_tb_per_s, link
        )
    amount = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)", text.strip())
    if amount and amount[2].upper() in _UNITS:
        size = float(amount[1]) * _UNITS[amount[2].upper()]
        if not 1 <= size < 2**63:
            raise ConfigError(f"--device {text}: is no amount of memory; write one such as 24GiB")
        return Device(text.strip(), int(size))
    raise ConfigError(
        f"--device {text}: is neither a known device nor an amount of memory such as 24GiB; "
        f"{did_you_mean(text, _KNOWN, kind='devices')}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).upper()
