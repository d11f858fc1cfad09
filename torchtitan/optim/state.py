"""How optimizer state is stored: in 32 or 16 bits or in blocks of codes, on the parameter's device or in host memory."""

# Shapes: R rows and C columns of a rank's part of a parameter, all its dimensions but the last flattened into rows;
# K elements of a block, which lies within a row, so that blocks are the same however rows are dealt to ranks.

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from torchtitan import torch_api
from torchtitan.optim.codecs import Codec, make_codec
from torchtitan.optim.rounding import Noise, stochastic_round

StateDtype = Literal["float32", "bfloat16", "int8", "int4", "float8"]
DEFAULT_BLOCK_SIZE: dict[StateDtype, int] = {"int8": 256, "int4": 128, "float8": 256}
"""Elements of a block, as in arXiv:2110.02861 (made smaller) and arXiv:2309.01507."""

_MIN_NUMEL = 4096
_MIN_BLOCK = 16


class State(ABC):
    """One quantity that an optimizer keeps for each element of a parameter, such as a running mean."""

    in_place = False
    """Whether `load` returns the stored numbers themselves, so that changing them is storing them."""

    @abstractmethod
    def load(self, rows: slice) -> Tensor:
        """``(r, C)`` float32 on the parameter's device."""

    @abstractmethod
    def store(self, rows: slice, values: Tensor, skip: Tensor) -> None:
        """Keep ``values`` ``(r, C)`` float32, or what there was where ``skip`` is 1."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Live tensors by the suffix of their name, sharded as the parameter is."""


class Plain(State):
    """float32 as it is.

    Args:
        parameter: whose state it is.
        offload: keep it in host memory.
    """

    def __init__(self, parameter: Tensor, *, offload: bool) -> None:
        self._tensor = companion(parameter, torch.float32, offload=offload)
        self._matrix = matrix_of(self._tensor)
        self._device = local_of(parameter).device
        self.in_place = self._matrix.device == self._device

    def load(self, rows: slice) -> Tensor:
        """See `State.load`."""
        return self._matrix[rows].to(self._device, non_blocking=True)

    def store(self, rows: slice, values: Tensor, skip: Tensor) -> None:
        """See `State.store`."""
        if self.in_place:
            return
        old = self._matrix[rows].to(self._device, non_blocking=True)
        self._matrix[rows].copy_(torch.where(skip > 0, old, values), non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """See `State.tensors`."""
        return {"": self._tensor}


class Rounded(State):
    """bfloat16 with stochastic rounding: changes too small for its 8 bits still add up in the mean.

    Args:
        parameter: whose state it is.
        name: key of the random bits.
        step: number of the update, live.
        offload: keep it in host memory.
    """

    def __init__(self, parameter: Tensor, name: str, step: Tensor, *, offload: bool) -> None:
        self._tensor = companion(parameter, torch.bfloat16, offload=offload)
        self._matrix = matrix_of(self._tensor)
        self._device = local_of(parameter).device
        self._noise, self._step = Noise(name, parameter), step

    def load(self, rows: slice) -> Tensor:
        """See `State.load`."""
        return self._matrix[rows].to(self._device, non_blocking=True).float()

    def store(self, rows: slice, values: Tensor, skip: Tensor) -> None:
        """See `State.store`."""
        new = stochastic_round(values.contiguous(), self._noise.bits(self._step, rows))
        old = self._matrix[rows].to(self._device, non_blocking=True)
        self._matrix[rows].copy_(torch.where(skip > 0, old, new), non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """See `State.tensors`."""
        return {"": self._tensor}


class Blocks(State):
    """A code of 8 or 4 bits for each element, and the largest magnitude of each block in float32.

    Block-wise quantization, arXiv:2110.02861 section 2.1.

    Args:
        parameter: whose state it is.
        codec: from numbers in [-1, 1] to codes.
        block_size: K; it divides the last dimension of every rank's part.
        offload: keep it in host memory.
    """

    def __init__(self, parameter: Tensor, codec: Codec, block_size: int, *, offload: bool) -> None:
        self._codec, self._block_size = codec, block_size
        self._device = local_of(parameter).device
        self._codes = companion(parameter, torch.uint8, per=codec.codes_per_byte, offload=offload)
        self._scales = companion(parameter, torch.float32, per=block_size, offload=offload)

    def load(self, rows: slice) -> Tensor:
        """See `State.load`."""
        codes, scales = self._stored(rows)
        values = self._codec.decode(codes)  # (r, C)
        return (values.unflatten(-1, (-1, self._block_size)) * scales[..., None]).flatten(-2)

    def store(self, rows: slice, values: Tensor, skip: Tensor) -> None:
        """See `State.store`."""
        blocks = values.unflatten(-1, (-1, self._block_size))  # (r, C/K, K)
        scales = blocks.abs().amax(-1)  # (r, C/K)
        floor = torch.finfo(torch.float32).tiny  # a block of zeros
        codes = self._codec.encode((blocks / scales.clamp(min=floor)[..., None]).flatten(-2))
        for new, old, whole in zip(
            (codes, scales), self._stored(rows), (self._codes, self._scales), strict=True
        ):
            matrix_of(whole)[rows].copy_(torch.where(skip > 0, old, new), non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """See `State.tensors`."""
        return {".codes": self._codes, ".scales": self._scales}

    def _stored(self, rows: slice) -> tuple[Tensor, Tensor]:
        codes, scales = (
            matrix_of(whole)[rows].to(self._device, non_blocking=True)
            for whole in (self._codes, self._scales)
        )
        return codes, scales


def make_state(
    dtype: StateDtype,
    parameter: Tensor,
    name: str,
    step: Tensor,
    *,
    signed: bool,
    block_size: int | None,
    offload: bool,
) -> State:
    """Make the state of a parameter, zero to begin with.

    Codes are for matrices of some size; what is small or has rows of an odd length stays in float32. It goes by
    the whole parameter's shape, so it is the same on every mesh.

    Args:
        dtype: how it is stored.
        parameter: whose state it is.
        name: of parameter and state, key of the random bits.
        step: number of the update, live.
        signed: False for what is never negative.
        block_size: of codes; None for that of the type.
        offload: keep it in host memory.

    Raises:
        ValueError: if the blocks do not fit into a rank's part; see `misfit`.
    """
    if dtype == "bfloat16":
        return Rounded(parameter, name, step, offload=offload)
    block = block_of(parameter, dtype, block_size)
    if block is None:
        return Plain(parameter, offload=offload)
    problem = misfit(parameter, block)
    if problem:
        raise ValueError(problem)
    codec = make_codec(dtype, signed=signed, device=local_of(parameter).device)
    return Blocks(parameter, codec, block, offload=offload)


def block_of(parameter: Tensor, dtype: StateDtype, block_size: int | None) -> int | None:
    """Elements of a block of codes; None if the parameter has none."""
    if dtype not in DEFAULT_BLOCK_SIZE or parameter.ndim < 2 or parameter.numel() < _MIN_NUMEL:
        return None
    block = math.gcd(parameter.shape[-1], block_size or DEFAULT_BLOCK_SIZE[dtype])
    return block if block >= _MIN_BLOCK else None


def element_bytes(dtype: StateDtype, parameter: Tensor, block_size: int | None) -> float:
    """Bytes that `make_state` takes for each element of ``parameter``, scales included."""
    if dtype == "bfloat16":
        return 2.0
    block = block_of(parameter, dtype, block_size)
    if block is None:
        return 4.0
    return (0.5 if dtype == "int4" else 1.0) + 4 / block


def misfit(parameter: Tensor, block: int) -> str | None:
    """What is wrong with blocks of ``block`` elements, if the mesh cuts the last dimension within one."""
    if not isinstance(parameter, torch_api.DTensor):
        return None
    last, ranks = parameter.ndim - 1, 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if getattr(placement, "dim", None) == last:  # is_shard() denies strided shards
            ranks *= size
    columns = parameter.shape[-1]
    if not cuts_blocks(columns, ranks, block):
        return None
    fitting = fitting_block(columns, ranks, block)
    remedy = f"block_size={fitting}" if fitting else "state_dtype=bfloat16"
    return (
        f"its {columns} columns over {ranks} ranks cut blocks of {block} elements; "
        f"set optimizer.{remedy}"
    )


def cuts_blocks(columns: int, ranks: int, block: int) -> bool:
    """Whether ``columns``, dealt to ``ranks``, are cut within a block of ``block`` elements."""
    return columns % (ranks * block) != 0


def fitting_block(columns: int, ranks: int, block: int) -> int | None:
    """The largest part of ``block`` that ``columns`` over ``ranks`` do not cut; None if that is too small."""
    fitting = math.gcd(columns // ranks, block) if columns % ranks == 0 else 0
    return fitting if fitting >= _MIN_BLOCK else None


def companion(parameter: Tensor, dtype: torch.dtype, *, per: int = 1, offload: bool) -> Tensor:
    """Zeros that are sharded as ``parameter`` is, one for each ``per`` elements of its last dimension.

    Args:
        parameter: tensor or DTensor.
        dtype: of the zeros.
        per: divides the last dimension of every rank's part.
        offload: in host memory, pinned where there is a GPU.
    """
    local = local_of(parameter)
    zeros = torch.zeros(
        _divided(local.shape, per), dtype=dtype, device="cpu" if offload else local.device
    )
    if offload and local.is_cuda:
        zeros = zeros.pin_memory()
    if not isinstance(parameter, torch_api.DTensor):
        return zeros
    whole = torch.empty(_divided(parameter.shape, per), device="meta")
    spec = torch_api.DTensorSpec(
        parameter.device_mesh,
        parameter.placements,
        tensor_meta=torch_api.TensorMeta(whole.shape, whole.stride(), dtype),
    )
    # Not from_local, which would move an offloaded part to the mesh's device.
    return torch_api.DTensor(zeros, spec, requires_grad=False)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, torch_api.DTensor) else detached


def matrix_of(tensor: Tensor) -> Tensor:
    """``(R, C)`` view of this rank's part; a vector is one row."""
    local = local_of(tensor)
    columns = local.shape[-1] if local.ndim else 1
    rows = local.shape[:-1].numel()
    return local.view(rows, columns)


def _divided(shape: torch.Size, per: int) -> tuple[int, ...]:
    return tuple(shape) if per == 1 else (*shape[:-1], shape[-1] // per)
