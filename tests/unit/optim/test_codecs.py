import pytest
import torch

from torchtitan.optim.codecs import dynamic_map, make_codec

CPU = torch.device("cpu")
KINDS = [(d, s) for d in ("int8", "int4", "float8") for s in (True, False)]


def numbers_of(codec):
    if codec.codes_per_byte == 1:
        return codec.decode(torch.arange(256, dtype=torch.uint8))
    pairs = torch.arange(16, dtype=torch.uint8)
    return codec.decode(pairs | (pairs << 4))[::2]


@pytest.mark.parametrize(("dtype", "signed"), KINDS)
def test_a_code_is_that_of_the_nearest_number(dtype, signed):
    codec = make_codec(dtype, signed=signed, device=CPU)
    values = torch.rand(40, 64, generator=torch.Generator().manual_seed(0)) ** 3
    values = values * 2 - 1 if signed else values
    numbers = numbers_of(codec)
    numbers = numbers[numbers.isfinite()]
    found = codec.decode(codec.encode(values))
    nearest = (values[..., None] - numbers).abs().amin(-1)
    assert torch.allclose((found - values).abs(), nearest, atol=1e-7)


@pytest.mark.parametrize(("dtype", "signed"), KINDS)
def test_numbers_survive_and_one_is_among_them(dtype, signed):
    codec = make_codec(dtype, signed=signed, device=CPU)
    numbers = numbers_of(codec)
    numbers = numbers[numbers.isfinite()]
    assert numbers.max() == 1.0
    assert torch.equal(codec.decode(codec.encode(numbers)), numbers)


@pytest.mark.parametrize(("dtype", "per_byte"), [("int8", 1), ("float8", 1), ("int4", 2)])
def test_size_of_the_codes(dtype, per_byte):
    codec = make_codec(dtype, signed=True, device=CPU)
    codes = codec.encode(torch.zeros(3, 8))
    assert codes.dtype == torch.uint8
    assert codes.shape == (3, 8 // per_byte)
    assert codec.codes_per_byte == per_byte


def test_the_dynamic_map_has_the_papers_numbers():
    """arXiv:2110.02861, figure 2: sizes, ends, and the coarsest and finest steps of the public implementations."""
    signed, unsigned = (dynamic_map(exponents=7, signed=s) for s in (True, False))
    for numbers in (signed, unsigned):
        assert len(numbers.unique()) == 256
        assert numbers[-1] == 1.0
        assert (numbers == 0).sum() == 1
    assert signed[0].item() == pytest.approx(-0.99296875)
    assert signed[128].item() == pytest.approx(5.5e-7)
    assert unsigned[1].item() == pytest.approx(3.25e-7)
    assert unsigned[-2].item() == pytest.approx(0.99648437)
    positive = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    assert dynamic_map(exponents=3, signed=True).tolist() == pytest.approx(
        [*(-n for n in reversed(positive)), 0, *positive, 1]
    )
    assert 0 not in numbers_of(make_codec("int4", signed=False, device=CPU))
