import pytest
import torch

from torchtitan.metrics.peak_flops import peak_tflops


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 80GB HBM3", "torch.float8_e4m3fn", 1979.0),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "fp8", 1670.5),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA B200", "float16", 2250.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI300X OAM", "bfloat16", 1307.4),
    ],
)
def test_known_devices(name, dtype, peak):
    assert peak_tflops(name, dtype) == peak


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "bfloat16"),
        ("NVIDIA H100", "bfloat16"),  # SXM, PCIe or NVL
        ("NVIDIA H20", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA A100-SXM4-80GB", "float8"),
        ("NVIDIA A100-SXM4-80GB", "int8"),
        ("Some GPU of next year", "bfloat16"),
    ],
)
def test_unknown_devices_are_not_guessed(name, dtype):
    assert peak_tflops(name, dtype) is None


def test_float32_means_tf32_where_it_is_allowed():
    name = "NVIDIA A100-SXM4-80GB"
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert peak_tflops(name, "float32") == 156.0
        matmul.fp32_precision = "ieee"
        assert peak_tflops(name, "float32") == 19.5
    finally:
        matmul.fp32_precision = before
