"""Names of devices and amounts of memory."""

import pytest

from torchtitan.errors import ConfigError
from torchtitan.planner.devices import GIB, find_device

NAMES = (
    "H100-80GB",
    "H200",
    "A100-80GB",
    "A100-40GB",
    "B200",
    "MI300X",
    "L40S",
    "RTX4090",
    "RTX 5090",
    "h100",
)


@pytest.mark.parametrize("name", NAMES)
def test_known_devices_have_memory_and_rates(name):
    device = find_device(name)
    assert device.memory > 20 * GIB
    assert device.peak_tflops
    assert device.memory_tb_per_s
    assert device.link_gb_per_s


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("80 GB", 80 * 10**9), ("1000", 1000), ("0.5gib", GIB // 2)],
)
def test_amounts_of_memory(text, size):
    assert find_device(text).memory == size


def test_an_unknown_device_names_the_like():
    with pytest.raises(
        ConfigError, match=r"--device RTX4091: is neither a known device nor.*RTX4090"
    ):
        find_device("RTX4091")
