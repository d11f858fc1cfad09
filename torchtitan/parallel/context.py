"""Context parallelism: the tokens of a row are spread over ranks, and attention brings them together.

Nothing but attention looks across tokens, so a batch is cut along the sequence before it reaches the model (`cut`), and
the attention backends of the model are wrapped (`apply_context_parallel`). The labels are shifted already, so nothing
changes at the edges of a part.
"""

# Shapes: B batch rows, S tokens of a row, H query heads, K kv heads, Dh head dim; "/cp" = this rank's part.

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.batch import Batch
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.attention import InnerAttention
from torchtitan.models.layers.mask import Mask
from torchtitan.ops.all_to_all import heads_to_tokens, tokens_to_heads
from torchtitan.ops.attention_pieces import Span, encode, pieces
from torchtitan.ops.context_attention import context_attention, gather_tokens
from torchtitan.parallel.degrees import divisors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Kind = Literal["all_gather", "ring", "ulysses"]


class ContextParallel(Configurable):
    """How the ranks that share the tokens of a row attend to each other's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `ContextParallel`; without effect at cp=1."""

        OPERATIONAL = frozenset({"kind"})

        kind: Kind = "all_gather"
        """all_gather: keys and values of the whole row are gathered, a layer at a time. ring: they go round in parts
        while the part before is computed with. ulysses: each rank has all tokens of a part of the heads."""

        def check_seq_len(self, seq_len: int, cp: int) -> Iterator[Problem]:
            """Yield a problem if rows of ``seq_len`` tokens cannot be cut for ``cp`` ranks."""
            n_chunks = Layout(self.kind, cp).n_chunks
            if cp == 1 or seq_len < 1 or seq_len % n_chunks == 0:
                return
            below = seq_len - seq_len % n_chunks
            fitting = [n for n in divisors(seq_len) if seq_len % Layout(self.kind, n).n_chunks == 0]
            yield Problem(
                "seq_len",
                seq_len,
                f"does not divide into the {n_chunks} chunks of cp={cp} with context.kind={self.kind}",
                f"set {[n for n in (below, below + n_chunks) if n]}, or cp to one of {fitting or [1]}",
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of a row each rank holds.

    Under a causal mask late queries have more keys than early ones. So for `all_gather` and `ring` a row is cut into
    2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r: every rank has the same work. Under `ulysses` all ranks
    have all tokens in attention, and rank r holds the r-th part.

    Attributes:
        kind: of context parallelism.
        cp: ranks that share a row.
    """

    kind: Kind
    cp: int

    @property
    def n_chunks(self) -> int:
        """Parts that a row must divide into."""
        return self.cp if self.kind == "ulysses" else 2 * self.cp

    def spans(self, rank: int, seq_len: int) -> list[Span]:
        """The tokens of ``rank``, in the order in which it holds them."""
        size = seq_len // self.n_chunks
        chunks = [rank] if self.kind == "ulysses" else [rank, self.n_chunks - 1 - rank]
        return [Span(c * size, (c + 1) * size, i * size) for i, c in enumerate(chunks)]

    def places(self, rank: int, seq_len: int) -> Tensor:
        """``(S/cp,)``: the place in the row of each token of ``rank``."""
        spans = self.spans(rank, seq_len)
        return torch.cat([torch.arange(span.start, span.stop) for span in spans])

    def order(self, seq_len: int) -> Tensor:
        """``(S,)``: for each token of a row its index among the parts of all ranks, one after another."""
        return torch.cat([self.places(rank, seq_len) for rank in range(self.cp)]).argsort()


def cut(batch: Batch, mesh: "DeviceMesh", kind: Kind) -> Batch:
    """This rank's tokens of every row: ``(B, S, ...) -> (B, S/cp, ...)`` for every field with a token dimension.

    Args:
        batch: whole rows, the same on all ranks of ``mesh``; ``tokens`` tells S. Fields without a second dimension of
            S stay whole.
        mesh: the cp axis.
        kind: of context parallelism.

    Raises:
        ValueError: if the rows cannot be cut evenly.
    """
    layout = Layout(kind, mesh.size())
    if layout.cp == 1:
        return batch
    seq_len = batch["tokens"].shape[1]
    if seq_len % layout.n_chunks:
        raise ValueError(
            f"rows of {seq_len} tokens do not divide into the {layout.n_chunks} chunks of cp={layout.cp} with "
            f"kind={kind}; pass a multiple of {layout.n_chunks}"
        )
    places = layout.places(mesh.get_local_rank(), seq_len)
    return {
        name: field[:, places] if field.shape[1:2] == (seq_len,) else field
        for name, field in batch.items()
    }


def apply_context_parallel(model: nn.Module, mesh: "DeviceMesh", kind: Kind) -> None:
    """Wrap every attention backend of ``model`` in place, so that it attends over the ranks of ``mesh``.

    At degree 1 the backends stay as they are: there is nothing to exchange.
    """
    if mesh.size() == 1:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, InnerAttention):
                setattr(parent, name, _WRAPPERS[kind](child, mesh.get_group(), kind))


class ContextAttention(InnerAttention):
    """An attention backend that gets and returns this rank's tokens, and attends over those of all ranks.

    Args:
        inner: the backend that it stands for.
        group: the ranks that share a row.
        kind: of context parallelism.
    """

    def __init__(self, inner: InnerAttention, group: dist.ProcessGroup, kind: Kind) -> None:
        super().__init__()
        self.inner = inner
        self.group = group
        self.layout = Layout(kind, dist.get_world_size(group))

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"kind={self.layout.kind}, cp={self.layout.cp}"

    def alone(self) -> InnerAttention:
        """See `InnerAttention.alone`."""
        return self.inner


class Blockwise(ContextAttention):
    """Kinds ``all_gather`` and ``ring``: queries stay, keys and values travel.

    Computes in pieces without masks by itself, as the parts must be merged by their log-sum-exp: what the backend
    inside defines, without calling it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(B, S/cp, H, Dh), (B, S/cp, K, Dh), (B, S/cp, K, Dv) -> (B, S/cp, H, Dv)``."""
        self.prepare(mask, q.shape[1], q.device)
        plan, order = mask.derived["context_plan"]
        return context_attention(q, k, v, plan, order, self.group)

    def prepare(self, mask: Mask, seq_len: int, device: torch.device) -> None:
        """See `InnerAttention.prepare`."""
        if "context_plan" not in mask.derived:
            mask.derived["context_plan"] = self._plan(mask, seq_len * self.layout.cp, device)

    def _plan(self, mask: Mask, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """What `context_attention` takes besides q, k and v."""
        layout = self.layout
        order = layout.order(seq_len).to(device)
        documents = _documents(mask, self.group, order)
        held = [layout.spans(rank, seq_len) for rank in range(layout.cp)]
        own, ring = held[dist.get_rank(self.group)], layout.kind == "ring"
        plan = [
            pieces(documents, own, keys, causal=mask.causal, window=mask.window)
            for keys in (held if ring else [[Span(0, seq_len, 0)]])
        ]
        return encode(plan), None if ring else order


class Ulysses(ContextAttention):
    """Kind ``ulysses`` (arXiv:2309.14509): the backend inside sees all tokens of H/cp heads.

    Fewer kv heads than ranks, or a number that they do not divide, are repeated until they do.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(B, S/cp, H, Dh), (B, S/cp, K, Dh), (B, S/cp, K, Dv) -> (B, S/cp, H, Dv)``."""
        self.prepare(mask, q.shape[1], q.device)
        n_kv_heads = k.shape[2]
        repeats = math.lcm(n_kv_heads, self.layout.cp) // n_kv_heads
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
        q, k, v = (tokens_to_heads(t, self.group) for t in (q, k, v))  # (B, S, H/cp, Dh)
        out = self.inner(q, k, v, mask.derived["context_whole"])  # (B, S, H/cp, Dv)
        return heads_to_tokens(out, self.group)

    def prepare(self, mask: Mask, seq_len: int, device: torch.device) -> None:
        """See `InnerAttention.prepare`."""
        if "context_whole" in mask.derived:
            return
        ids, whole_len = mask.document_ids, seq_len * self.layout.cp
        if ids is not None:
            ids = gather_tokens(ids, self.group, self.layout.order(whole_len).to(device))
        whole = Mask(ids, causal=mask.causal, window=mask.window)
        self.inner.prepare(whole, whole_len, device)
        mask.derived["context_whole"] = whole


def _documents(mask: Mask, group: dist.ProcessGroup, order: Tensor) -> list[list[tuple[int, int]]]:
    """For each row the (start, stop) of its documents; one row stands for all where there are no documents."""
    seq_len = len(order)
    if mask.document_ids is None:
        return [[(0, seq_len)]]
    ids = gather_tokens(mask.document_ids, group, order)  # (B, S)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    runs = []
    for row in starts.cpu():  # sync: once a forward, for all layers
        first = row.nonzero().squeeze(1).tolist()
        runs.append(list(zip(first, [*first[1:], seq_len], strict=True)))
    return runs


_WRAPPERS: dict[Kind, type[ContextAttention]] = {
    "all_gather": Blockwise,
    "ring": Blockwise,
    "ulysses": Ulysses,
}
