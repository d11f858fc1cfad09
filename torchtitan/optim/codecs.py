"""From numbers in [-1, 1] to codes of 8 or 4 bits and back."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchtitan.optim.state import StateDtype

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class Codec(ABC):
    """A fixed set of numbers, each with a code."""

    codes_per_byte: int

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Codes of the nearest numbers: ``(..., C)`` float32 in [-1, 1] -> ``(..., C / codes_per_byte)`` uint8."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """``(..., C / codes_per_byte)`` uint8 -> ``(..., C)`` float32."""


class Table(Codec):
    """The numbers of a table, 256 or 16 of them.

    Args:
        numbers: ascending, float32.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.codes_per_byte = 1 if len(numbers) == 256 else 2
        self._numbers = numbers
        self._bounds = (numbers[:-1] + numbers[1:]) / 2

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec.encode`."""
        codes = torch.bucketize(values, self._bounds, out_int32=True).to(torch.uint8)
        if self.codes_per_byte == 1:
            return codes
        return codes[..., ::2] | (codes[..., 1::2] << 4)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Codec.decode`."""
        if self.codes_per_byte == 2:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        return self._numbers[codes.int()]


class Float8(Codec):
    """The numbers of float8 e4m3, scaled to [-1, 1]."""

    codes_per_byte = 1

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec.encode`."""
        return (values * _FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Codec.decode`."""
        return codes.view(torch.float8_e4m3fn).float() / _FLOAT8_MAX


def make_codec(dtype: "StateDtype", *, signed: bool, device: torch.device) -> Codec:
    """The codec of ``int8``, ``int4`` or ``float8``.

    int8 has the dynamic map of arXiv:2110.02861 section 2.2, int4 the same with fewer bits; without a sign, int4 has 16
    even steps without zero (arXiv:2309.01507 section 4.1: a second moment of zero would make the update explode).
    """
    if dtype == "float8":
        return Float8()
    if dtype == "int8":
        numbers = dynamic_map(exponents=7, signed=signed)
    elif signed:
        numbers = dynamic_map(exponents=3, signed=True)
    else:
        numbers = torch.arange(1, 17, dtype=torch.float32) / 16
    return Table(numbers.to(device))


def dynamic_map(*, exponents: int, signed: bool) -> Tensor:
    """Numbers in [-1, 1], ascending, the denser the nearer to 0.

    They are zero, one, and for each power of ten the middles of equal intervals, twice as many of them as for the
    power below.

    Args:
        exponents: powers of ten, from 10^0 down.
        signed: with the negatives of the magnitudes between 0 and 1, of which there are then half as many.
    """
    magnitudes = []
    for exponent in range(exponents):
        n = 2**exponent * (1 if signed else 2)
        edges = torch.linspace(0.1, 1, n + 1, dtype=torch.float64)
        magnitudes.append(10.0 ** (exponent - exponents + 1) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(magnitudes)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    parts = (-positive, positive, ends) if signed else (positive, ends)
    return torch.cat(parts).sort().values.float()
