"""Weight initialisation that depends on the seed and the parameter's name, and on nothing else.

A parameter is filled in blocks of rows. Each block has its own random stream, seeded by (seed, name, block), so a
rank that holds some rows draws just the blocks they lie in: no rank ever holds a whole sharded parameter, and the
values are those of one process for any mesh and any placement. (CPU and CUDA have different generators, so the
same seed gives other values on another kind of device.)
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchtitan import torch_api

_BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True)
class Initializer:
    """A truncated normal distribution, or a constant.

    Attributes:
        mean: the constant, or the centre of the distribution.
        std: standard deviation before truncation; 0 means the constant ``mean``.
        cut: values lie within ``mean ± cut * std``.
    """

    mean: float = 0.0
    std: float = 0.0
    cut: float = 3.0

    def sample(self, rows: int, row_shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Draw ``(rows, *row_shape)`` in float32 on the generator's device."""
        out = torch.empty((rows, *row_shape), dtype=torch.float32, device=generator.device)
        low, high = self.mean - self.cut * self.std, self.mean + self.cut * self.std
        return nn.init.trunc_normal_(out, self.mean, self.std, low, high, generator=generator)


@runtime_checkable
class HasInitializers(Protocol):
    """A module with parameters or buffers of its own, which says how each of them starts."""

    def initializers(self) -> dict[str, Initializer]:
        """Map the name of each own parameter or buffer (``weight``) to its initializer."""
        ...


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of ``model`` in place, sharded or not.

    A parameter that two modules share is filled once, under its first name.

    Args:
        model: materialised (not on the meta device).
        seed: of the whole run.

    Raises:
        TypeError: if a module has a parameter or buffer that its ``initializers`` do not name.
    """
    seen: set[Tensor] = set()
    for module_name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        declared = module.initializers() if isinstance(module, HasInitializers) else {}
        for own_name, parameter in own:
            if parameter in seen:
                continue
            seen.add(parameter)
            name = f"{module_name}.{own_name}" if module_name else own_name
            if own_name not in declared:
                raise TypeError(
                    f"{name!r} has no initializer; "
                    f"name {own_name!r} in {type(module).__name__}.initializers()"
                )
            fill(parameter, name, declared[own_name], seed)


def fill(parameter: Tensor, name: str, initializer: Initializer, seed: int) -> None:
    """Fill this rank's part of ``parameter`` (plain tensor or DTensor) in place."""
    local = parameter.to_local() if isinstance(parameter, torch_api.DTensor) else parameter
    if local.numel() == 0:
        return
    if initializer.std == 0:
        local.fill_(initializer.mean)
        return
    indices = held_indices(parameter)
    row_shape = parameter.shape[1:]
    for block, start, rows, picked in _blocks(parameter.shape, indices[0]):
        generator = torch.Generator(local.device).manual_seed(_block_seed(seed, name, block))
        values = initializer.sample(rows, row_shape, generator)
        values = values.index_select(0, indices[0][picked] - start)
        for dim in range(1, parameter.ndim):
            if len(indices[dim]) < parameter.shape[dim]:
                values = values.index_select(dim, indices[dim])
        local[picked] = values.to(local.dtype)


def _blocks(shape: torch.Size, held_rows: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield (block number, first row, number of rows, positions in ``held_rows``) of the blocks that are needed."""
    row_numel = max(1, shape[1:].numel())
    rows_per_block = max(1, _BLOCK_NUMEL // row_numel)
    block_of_row = held_rows // rows_per_block
    for block in block_of_row.unique().tolist():  # sync: once a parameter, at start
        start = block * rows_per_block
        rows = min(rows_per_block, shape[0] - start)
        yield block, start, rows, (block_of_row == block).nonzero().squeeze(1)


def held_indices(parameter: Tensor) -> list[Tensor]:
    """For each dimension, the global indices that this rank holds, in local order.

    Found by sharding an index vector in the same way, so every kind of placement is right, strided shards too.
    """
    if not isinstance(parameter, torch_api.DTensor):
        return [torch.arange(size, device=parameter.device) for size in parameter.shape]
    held = []
    for dim, size in enumerate(parameter.shape):
        index = torch.arange(size, device=parameter.device)
        shape = [size if d == dim else 1 for d in range(parameter.ndim)]
        placements = [
            p
            if getattr(p, "dim", None) == dim
            else torch_api.Replicate()  # is_shard() denies strided shards
            for p in parameter.placements
        ]
        spread = torch_api.distribute_tensor(
            index.view(shape), parameter.device_mesh, placements, src_data_rank=None
        )
        held.append(spread.to_local().flatten())
    return held


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
