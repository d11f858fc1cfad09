"""Expert parallelism: ranks hold different experts, and tokens travel to them and back."""

# Shapes: N rows on this rank, M rows that its experts get, D dim, E experts.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.models.layers.dispatch import Dispatcher, permute
from torchtitan.models.layers.experts import Experts
from torchtitan.models.layers.moe import MoE
from torchtitan.parallel.mesh import Mesh


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Cut the experts of every MoE layer over ``mesh.ep``, and let their tokens travel; in place.

    The gradient of an expert needs no scaling: its rank gets the tokens of all ep
    peers, and FSDP sums over the others, so it is the sum over all tokens.

    Args:
        model: on the meta device.
        mesh: of the run.
    """
    for moe in (m for m in model.modules() if isinstance(m, MoE)):
        moe.dispatcher = AllToAll(mesh)
        if mesh.degrees.ep == 1:
            continue
        for stack in moe.experts.stacks():
            weight = torch_api.distribute_tensor(
                stack.weight, mesh.ep, [torch_api.Shard(0)], src_data_rank=None
            )
            stack.weight = nn.Parameter(weight)


class AllToAll(Dispatcher):
    """Sends each row to the rank that has its expert, lets it compute there, and takes the result back.

    Args:
        mesh: of the run.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ep = mesh.ep.size()
        self._group = mesh.ep.get_group()

    def run(self, experts: Experts, rows: Tensor, counts: Tensor) -> tuple[Tensor, int]:
        """See `Dispatcher.run`; two all-to-alls of rows each way, and one of counts."""
        if self._ep == 1:
            return super().run(experts, rows, counts)
        by_rank = counts.view(self._ep, -1)  # (ep, E/ep), what goes where
        received = torch.empty_like(by_rank)  # (ep, E/ep), what comes from where
        dist.all_to_all_single(received, by_rank, group=self._group)
        sizes = torch.stack((by_rank.sum(1), received.sum(1))).tolist()  # sync: (2, ep)
        send, receive = sizes
        rows = _AllToAll.apply(rows, send, receive, self._group)  # (M, D), by rank, then expert
        order, inverse = _by_expert(received, sum(receive))
        rows = experts(permute(rows, order, inverse), received.sum(0))  # (M, D), by expert
        rows = permute(rows, inverse, order)
        return _AllToAll.apply(rows, receive, send, self._group), sum(receive)

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """See `Dispatcher.sum_over_row`: the cp and tp peers have other tokens of the same rows."""
        for axis in (self._mesh.cp, self._mesh.tp):
            if axis.size() > 1:
                dist.all_reduce(counts, group=axis.get_group())
        return counts

    def sum_over_batch(self, counts: Tensor) -> Tensor:
        """See `Dispatcher.sum_over_batch`."""
        return self._mesh.sum_over_tokens(counts)


def _by_expert(received: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order that puts rows sorted by (rank, expert) into that by (expert, rank), and its inverse: ``2 x (M,)``.

    Args:
        received: ``(ep, E/ep)`` int64, rows from each rank for each expert that is here.
        total: M, their sum; known, so that the device need not be asked.
    """
    local = torch.arange(received.shape[1], device=received.device).expand_as(received)
    expert = local.flatten().repeat_interleave(received.flatten(), output_size=total)  # (M,)
    order = expert.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(total, device=order.device)
    return order, inverse


class _AllToAll(torch.autograd.Function):
    """Rows to ranks and, backward, their gradients home: ``(sum(send), D) -> (sum(receive), D)``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = _exchange(grad_outputs[0], ctx.receive, ctx.send, ctx.group)
        return grad, None, None, None


def _exchange(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out
