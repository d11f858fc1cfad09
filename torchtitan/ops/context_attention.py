"""Attention whose queries, keys and values are spread over ranks: keys and values go round a ring, or are gathered."""

# Shapes: B batch rows, S tokens of a row, H query heads, K kv heads, Dh head dim of q and k, Dv of v; "/cp" = this rank's part.

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan import torch_api
from torchtitan.ops.all_to_all import named_group
from torchtitan.ops.attention_block import block_backward, block_forward, merge
from torchtitan.ops.attention_pieces import decode


class Exchange(ABC):
    """How the keys and values of all ranks come to this one, and their gradients go home.

    Args:
        group: the ranks that share a row.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    @abstractmethod
    def n_sources(self) -> int:
        """Parts that come one after another."""

    @abstractmethod
    def walk(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (source, its keys and values) until all have been here; ``kv`` is ``(B, S/cp, K, Dh + Dv)``."""

    @abstractmethod
    def walk_back(self, kv: Tensor, home: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (source, its keys and values, their gradient to add to); at the end ``home`` has the sum for ``kv``.

        Args:
            kv: ``(B, S/cp, K, Dh + Dv)``.
            home: in the shape of ``kv``, zeros in float32.
        """


class Ring(Exchange):
    """Blockwise (arXiv:2310.01889): each part goes from rank to rank while the one before it is computed with.

    Source ``r`` is the part of rank ``r``. No rank holds more than two parts at a time. A rank receives ``(cp-1)/cp``
    of all keys and values in the forward; in the backward the same again, and their gradients in float32.
    """

    @property
    def n_sources(self) -> int:
        """See `Exchange.n_sources`."""
        return self.size

    def walk(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See `Exchange.walk`."""
        for step in range(self.size):
            last = step == self.size - 1
            coming, works = (kv, []) if last else self._shift(kv, tag=step)
            yield (self.rank - step) % self.size, kv
            _wait(works)
            kv = coming

    def walk_back(self, kv: Tensor, home: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Exchange.walk_back`. The gradients follow their keys one step behind and end at home."""
        travelling, works = home, []
        for step, (source, part) in enumerate(self.walk(kv)):
            grad = home if step == 0 else torch.zeros_like(home)
            yield source, part, grad
            _wait(works)
            if step > 1:
                grad += travelling
            if step > 0:
                sent = grad  # must live until it has left
                travelling, works = self._shift(sent, tag=self.size + step)
        _wait(works)
        if self.size > 1:
            home += travelling

    def _shift(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Send to the next rank and receive from the one before, in the background."""
        received = torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before, tag=tag),
            ]
        )
        return received, works


class Gather(Exchange):
    """Keys and values of the whole row at once (Llama 3, arXiv:2407.21783, section 3.3.2), again in the backward.

    There is one source, 0. The gathered row lives for one layer at a time. A rank receives ``(cp-1)/cp`` of all keys
    and values in the forward; in the backward the same again, and their gradients in float32.

    Args:
        group: the ranks that share a row.
        order: ``(S,)``, for each token of the row its index among the parts of all ranks, one after another.
    """

    def __init__(self, group: dist.ProcessGroup, order: Tensor) -> None:
        super().__init__(group)
        self.order = order

    @property
    def n_sources(self) -> int:
        """See `Exchange.n_sources`."""
        return 1

    def walk(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See `Exchange.walk`."""
        yield 0, self._gather(kv)

    def walk_back(self, kv: Tensor, home: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Exchange.walk_back`."""
        whole = self._gather(kv)  # (B, S, K, Dh + Dv)
        grad = torch.zeros_like(whole, dtype=home.dtype)
        yield 0, whole, grad
        by_rank = torch.empty_like(grad)
        by_rank[:, self.order] = grad
        by_rank = by_rank.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        mine = home.new_empty(home.shape)
        torch_api.reduce_scatter_single(mine, by_rank.flatten(0, 1), group=self.group)
        home += mine

    def _gather(self, kv: Tensor) -> Tensor:
        """``(B, S/cp, ...) -> (B, S, ...)``, in the order of the row."""
        return gather_tokens(kv, self.group, self.order)


def gather_tokens(local: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """Put the tokens of all ranks in the order of their row: ``(B, S/cp, ...) -> (B, S, ...)``; no gradient.

    Args:
        local: this rank's tokens.
        group: the ranks that share a row.
        order: as in `Gather`.
    """
    size = dist.get_world_size(group)
    gathered = local.new_empty(size * local.shape[0], *local.shape[1:])  # (cp * B, S/cp, ...)
    torch_api.all_gather_single(gathered, local.contiguous(), group=group)
    by_rank = gathered.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)  # (B, S, ...)
    return by_rank[:, order]


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, order: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    """Softmax attention of this rank's queries over the keys of all ranks.

    Nothing larger than a rank's own tokens is kept for the backward, and no mask larger than a tile is made. Parts are
    merged, and gradients added up, in float32. One operator (`OPERATOR`), which torch.compile and checkpointing take as
    a whole.

    Args:
        q: ``(B, S/cp, H, Dh)``.
        k: ``(B, S/cp, K, Dh)``; K divides H.
        v: ``(B, S/cp, K, Dv)``.
        plan: for each source of the exchange the pieces of its keys and this rank's queries, as
            `torchtitan.ops.attention_pieces.encode` writes them; over all sources each query sees at least one key.
        order: that of `Gather`; None for a `Ring`.
        group: the ranks that share a row.

    Returns:
        ``(B, S/cp, H, Dv)``.
    """
    return _attention(q, k, v, plan, order, group.group_name)[0]


@torch.library.custom_op("torchtitan::context_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, order: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    """Output ``(B, S/cp, H, Dv)``, and the log-sum-exp of the scores ``(B, H, S/cp)``, float32."""
    batch, seq, heads, head_dim = q.shape
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32, device=q.device)
    lse = torch.full((batch, heads, seq), float("-inf"), device=q.device)
    exchange = _exchange(group, order)
    pieces = decode(plan, exchange.n_sources)
    for source, part in exchange.walk(torch.cat((k, v), dim=-1)):
        part_k, part_v = part[..., :head_dim], part[..., head_dim:]
        for piece in pieces[source]:
            rows, keys = piece.rows, piece.k
            block = block_forward(
                q[rows, piece.q], part_k[rows, keys], part_v[rows, keys], piece.band
            )
            merge(out[rows, piece.q], lse[rows, :, piece.q], *block)
    return out.to(q.dtype), lse


OPERATOR = torch.ops.torchtitan.context_attention.default
"""For policies that name operators, such as that of selective checkpointing."""


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, order: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq), dtype=torch.float32)
    return q.new_empty((batch, seq, heads, v.shape[-1])), lse


@torch.library.custom_op("torchtitan::context_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Tensor,
    order: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes."""
    head_dim = q.shape[-1]
    kv = torch.cat((k, v), dim=-1)  # (B, S/cp, K, Dh + Dv)
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    home = torch.zeros_like(kv, dtype=torch.float32)
    exchange = _exchange(group, order)
    pieces = decode(plan, exchange.n_sources)
    for source, part, grad in exchange.walk_back(kv, home):
        part_k, part_v = part[..., :head_dim], part[..., head_dim:]
        for piece in pieces[source]:
            rows, queries, keys = piece.rows, piece.q, piece.k
            more_q, more_k, more_v = block_backward(
                grad_out[rows, queries],
                q[rows, queries],
                part_k[rows, keys],
                part_v[rows, keys],
                out[rows, queries],
                lse[rows, :, queries],
                piece.band,
            )
            grad_q[rows, queries] += more_q
            grad[rows, keys] += torch.cat((more_k, more_v), dim=-1)
    grad_k, grad_v = home.split((head_dim, v.shape[-1]), dim=-1)
    grad_k, grad_v = (
        g.to(k.dtype, copy=True, memory_format=torch.contiguous_format) for g in (grad_k, grad_v)
    )  # an operator's results may not share memory
    return grad_q.to(q.dtype), grad_k, grad_v


@_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, plan, order, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output, plan, order)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    del grad_lse  # the log-sum-exp is not handed out
    return *_attention_backward(grad_out, *ctx.saved_tensors, ctx.group), None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _exchange(group_name: str, order: Tensor | None) -> Exchange:
    group = named_group(group_name)
    return Ring(group) if order is None else Gather(group, order)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
