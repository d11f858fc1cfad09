"""Parameters with users in two pipeline stages, such as a tied embedding."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.parallel.pipeline import ModelParts


@dataclass(frozen=True, slots=True)
class _Pair:
    """A copy and its owner: the same shard of the same table, on two ranks of the pipeline or on one.

    Attributes:
        owner_rank: rank along the pipeline that steps, counts and saves the parameter.
        copy_rank: rank along the pipeline that has the copy.
        owner: the parameter, on its rank.
        copy: the copy, on its rank.
    """

    owner_rank: int
    copy_rank: int
    owner: nn.Parameter | None
    copy: nn.Parameter | None


class SharedParameters:
    """Keeps copies equal to their owner and adds their gradients to its.

    The owner alone has optimizer state and is in norm, clip, checkpoint and counts, each once. So the copy gets the
    owner's value before a pass and gives its gradient after it: as many bytes as an all-reduce of the gradient, no
    second state, and nothing that changes weights (an optimizer, a checkpoint) needs to know of the copy.

    Args:
        model: this rank's stages. Collective over the pipeline.
    """

    def __init__(self, model: ModelParts) -> None:
        self._group = model.group
        owned, copies = dict(model.named_parameters()), model.copies
        shared = model.shared_parameters()
        mine = (sorted(set(shared.values()) & owned.keys()), sorted(copies))
        everywhere: list[tuple[list[str], list[str]]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(everywhere, mine, group=self._group)
        self._pairs = [
            _Pair(owner_rank, copy_rank, owned.get(shared[name]), copies.get(name))
            for copy_rank, (_, names) in enumerate(everywhere)
            for name in names
            for owner_rank, (owners, _) in enumerate(everywhere)
            if shared[name] in owners
        ]

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Give every copy its owner's value. Collective over the pipeline."""
        for pair in self._pairs:
            source = None if pair.owner is None else _local(pair.owner)
            target = None if pair.copy is None else _local(pair.copy)
            self._copy(source, pair.owner_rank, target, pair.copy_rank)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradient of every copy to its owner's, and free it. Collective over the pipeline."""
        for pair in self._pairs:
            source = None if pair.copy is None else _gradient(pair.copy)
            own = None if pair.owner is None else _gradient(pair.owner)
            arrived = None if own is None else torch.empty_like(own)
            self._copy(source, pair.copy_rank, arrived, pair.owner_rank)
            if own is not None and arrived is not None:
                own += arrived
            if pair.copy is not None:
                pair.copy.grad = None

    def _copy(
        self, source: Tensor | None, from_rank: int, target: Tensor | None, to_rank: int
    ) -> None:
        """Copy ``source``, which is on one rank of the pipeline, into ``target``, which is on another or the same."""
        if from_rank == to_rank:
            if source is not None and target is not None:
                target.copy_(source)
        elif source is not None:
            dist.send(source.contiguous(), group=self._group, group_dst=to_rank)
        elif target is not None:
            received = torch.empty_like(target, memory_format=torch.contiguous_format)
            dist.recv(received, group=self._group, group_src=from_rank)
            target.copy_(received)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, torch_api.DTensor) else tensor


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's shard of the gradient; None if the parameter does not learn.

    Raises:
        RuntimeError: if it learns and has none.
    """
    if not parameter.requires_grad:
        return None
    if parameter.grad is None:
        raise RuntimeError(
            "a parameter that two pipeline stages share has no gradient in one of them"
        )
    return _local(parameter.grad)
