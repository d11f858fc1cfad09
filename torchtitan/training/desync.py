"""What several ranks hold must be the same bits on all of them: a check that names the rank, the thing and the step."""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan import torch_api
from torchtitan.errors import DistributedError
from torchtitan.parallel.mesh import Mesh

Thing = tuple[str, tuple[int, ...]]
"""A name, and which part of it: ranks that have the same thing must have the same digest of it."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_NUMEL = 1 << 22  # a digest takes 16 bytes for each of these elements
_SHOWN = 5


def compare_ranks(
    mesh: Mesh,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor],
    loader_state: Mapping[str, Any] | None,
) -> None:
    """Compare what ranks hold alike: one gather of a number for each tensor, on the CPU group.

    Args:
        mesh: of the run.
        step: optimizer steps done on this rank.
        tensors: of a checkpoint; a DTensor's part is held by all ranks that have the same coordinates on the axes that
            shard it, a plain tensor by all ranks that have its name.
        numbers: what is reduced over all ranks.
        loader_state: position of this data rank, which its cp, tp and pp peers have too.

    Raises:
        DistributedError: on all ranks, if two of them differ.
    """
    own: dict[Thing, int] = {("the step", ()): step}
    streams = loader_state["streams"] if loader_state else {}
    for number, stream in streams.items():
        text = json.dumps(stream, sort_keys=True)
        own["the data position", (int(number),)] = zlib.crc32(text.encode())
    digests = {("the " + name, ()): _digest(number) for name, number in numbers.items()}
    digests |= {(name, _part(tensor)): _digest(_local(tensor)) for name, tensor in tensors.items()}
    stacked = torch.stack([digest.to(mesh.device) for digest in digests.values()])
    own |= dict(zip(digests, stacked.tolist(), strict=True))  # sync
    everyone: list[Any] = [own] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(everyone, own, group=mesh.control)
    found = list(differences(everyone))
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise DistributedError(
            f"step {step}: ranks that must hold the same do not: {'; '.join(found[:_SHOWN])}{more}. Nothing was saved "
            "since; resume from the last checkpoint before it went wrong, and look at the machine of a rank that is "
            "alone with what it has"
        )


def differences(by_rank: Sequence[Mapping[Thing, int]]) -> Iterator[str]:
    """Yield a sentence for each thing that ranks hold differently; the fewer ranks are named first.

    Args:
        by_rank: the digest of each thing, by rank.
    """
    holders: dict[Thing, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, things in enumerate(by_rank):
        for thing, digest in things.items():
            holders[thing][digest].append(rank)
    for (name, _), ranks_of in holders.items():
        if len(ranks_of) > 1:
            few, *others = sorted(ranks_of.values(), key=len)
            rest = sorted(rank for ranks in others for rank in ranks)
            yield f"{name} of {_ranks(few)} is not that of {_ranks(rest)}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, torch_api.DTensor) else tensor


def _part(tensor: Tensor) -> tuple[int, ...]:
    """Coordinates of this rank on the axes that shard ``tensor``."""
    if not isinstance(tensor, torch_api.DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        coordinate
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
        if getattr(placement, "dim", None) is not None  # is_shard() denies strided shards
    )


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    """A number of all bits of ``tensor``, an int64 scalar on its device: the change of any one element changes it."""
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK_NUMEL) if len(bits) else ():
        odd = torch.arange(1, 2 * len(chunk), 2, device=bits.device)  # it has an inverse mod 2^64
        total = total * 31 + (chunk.long() * odd).sum()
    return total
