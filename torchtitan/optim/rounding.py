"""Stochastic rounding to bfloat16, whose random bits depend on step, name and element alone."""

# Shapes: R rows and C columns of a rank's part of a tensor, all its dimensions but the last flattened into rows.

import hashlib

import torch
from torch import Tensor

from torchtitan import torch_api
from torchtitan.models.layers.init import held_indices

_GOLDEN = -1640531535  # 0x9E3779B1: spreads neighbouring columns over all 32 bits


class Noise:
    """Random bits of each element of a tensor at each step.

    They are a hash of (name, step, place in the whole tensor). So no generator has a state that a checkpoint would
    have to hold, and the bits are the same however the tensor is sharded, on a CPU and on a GPU.

    Args:
        name: of the tensor; other names give other bits.
        like: the tensor or DTensor whose places are meant.
    """

    def __init__(self, name: str, like: Tensor) -> None:
        self._like = like
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
        self._key = int.from_bytes(digest, "little", signed=True)
        self._places: tuple[Tensor, Tensor] | None = None

    def bits(self, step: Tensor, rows: slice) -> Tensor:
        """``(r, C)`` int32, each uniform over the 2^16 values that 16 bits have.

        Args:
            step: scalar, on the tensor's device; it is not read by the host.
            rows: which rows of this rank's part.
        """
        if self._places is None:
            self._places = _places(self._like)  # once: it takes a few small kernels
        row_ids, column_ids = self._places
        key = _mix(step.to(torch.int32) ^ self._key)
        row_keys = _mix(row_ids[rows] ^ key)  # (r,)
        return _mix(row_keys[:, None] + column_ids * _GOLDEN) & 0xFFFF


def stochastic_round(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two nearest bfloat16, up with the probability that keeps the mean.

    Adds ``bits`` below the last kept bit and cuts (arXiv:2010.06192, section 3). What bfloat16 can hold, infinities
    included, stays as it is, whatever the bits.

    Args:
        values: float32, contiguous.
        bits: int32 of the same shape, from `Noise.bits`.
    """
    cut = (values.view(torch.int32) + bits) & -65536
    return cut.view(torch.float32).to(torch.bfloat16)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 that looks random: three xor-shifts with two multiplications between, which wrap."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)


def _places(like: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of this rank's rows ``(R,)`` and columns ``(C,)`` in the whole tensor, int32."""
    if like.ndim == 0:
        zero = torch.zeros(1, dtype=torch.int32, device=like.device)
        return zero, zero
    *leading, columns = held_indices(like)
    rows = torch.zeros(1, dtype=torch.int64, device=columns.device)
    for size, held in zip(like.shape[:-1], leading, strict=True):
        rows = (rows[:, None] * size + held).flatten()
    local = like.to_local() if isinstance(like, torch_api.DTensor) else like
    return tuple(ids.to(device=local.device, dtype=torch.int32) for ids in (rows, columns))  # pyright: ignore[reportReturnType] - two of them
