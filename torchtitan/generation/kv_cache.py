"""A cache of keys and values, as an attention backend that is put in the place of a model's own."""

# Shapes: B batch rows, S new tokens, L tokens so far, H query heads, K kv heads, G = H / K, Dh head dim. "/tp" = local to a TP rank.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.layers.attention import InnerAttention
from torchtitan.models.layers.mask import Mask


class KVCache:
    """What all layers share: where the new tokens of each row go, and what they may attend to.

    Rows have lengths of their own. New tokens are padded at the end; what a pad writes lies behind its row's length, where nothing
    attends to it, until a token of the row takes its place.

    Args:
        n_rows: B.
        capacity: tokens that a row may have, pads included.
        device: of the model.
    """

    def __init__(self, n_rows: int, capacity: int, device: torch.device) -> None:
        self.lengths = [0] * n_rows
        self.capacity = capacity
        self.device = device
        self.layers: list[CachedAttention] = []
        self.positions = torch.empty(0)
        """``(B, S)``, of the new tokens in their rows."""
        self.rows = torch.empty(0)
        """``(B, 1)``."""
        self.is_empty = True
        """Whether there is nothing before the new tokens."""
        self.common_start: int | None = 0
        """The length of all rows without the new tokens, if it is the same."""
        self.longest = 0
        """L of the longest row, with the new tokens and pads."""
        self._n_new = 0
        self._bias: dict[int | None, Tensor | None] = {}

    def begin(self, n_new: int) -> None:
        """Make room for ``n_new`` tokens of each row, pads included.

        Raises:
            ValueError: if they do not fit.
        """
        self._n_new = n_new
        longest = max(self.lengths)
        self.is_empty, self.longest = longest == 0, longest + n_new
        self.common_start = longest if min(self.lengths) == longest else None
        if self.longest > self.capacity:
            raise ValueError(
                f"{self.longest} tokens do not fit into a cache of {self.capacity}; make a larger one"
            )
        starts = torch.tensor(self.lengths, device=self.device)[:, None]
        self.positions = starts + torch.arange(self._n_new, device=self.device)  # (B, S)
        self.rows = torch.arange(len(self.lengths), device=self.device)[:, None]
        self._bias = {}

    def end(self, counts: Sequence[int]) -> None:
        """All layers have the new tokens."""
        self.lengths = [n + new for n, new in zip(self.lengths, counts, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        self.lengths = [self.lengths[i] for i in rows]
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            layer.keep(index)

    def bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores: ``(B, 1, G * S, L)``, 0 where a new token sees a key and -inf elsewhere; None for 0.

        Made once for all layers of a model, which have equally many queries for a key.
        """
        if window not in self._bias:
            self._bias[window] = self._make_bias(window, groups, dtype)
        return self._bias[window]

    def _make_bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        within = window is None or self.longest <= window
        if self._n_new == 1 and self.common_start is not None and within:
            return None
        back = self.positions[:, None, :, None] - torch.arange(self.longest, device=self.device)
        hidden = back < 0 if window is None else (back < 0) | (back >= window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        bias.masked_fill_(hidden, -torch.inf)
        return bias.repeat(1, 1, groups, 1) if self._n_new > 1 else bias


class CachedAttention(InnerAttention):
    """Attention of new tokens to all tokens of their rows so far.

    The first tokens of all rows have nothing before them: the backend that stood here computes their attention.

    Args:
        inner: the backend.
        cache: of the model.
    """

    def __init__(self, inner: InnerAttention, cache: KVCache) -> None:
        super().__init__()
        self.inner, self.cache = inner.alone(), cache
        self.keys = self.values = torch.empty(0)
        cache.layers.append(self)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(B, S, H/tp, Dh), 2 x (B, S, K/tp, Dh) -> (B, S, H/tp, Dh)``."""
        cache = self.cache
        if cache.is_empty:
            self.keys, self.values = self._room(k), self._room(v)
        self._store(self.keys, k)
        self._store(self.values, v)
        if cache.is_empty:
            return self.inner(q, k, v, mask)
        keys, values = (t[:, :, : cache.longest] for t in (self.keys, self.values))  # (B, K, L, Dh)
        (n_rows, n_new, n_heads, size), groups = q.shape, q.shape[2] // k.shape[2]
        bias = cache.bias(mask.window, groups, q.dtype)  # (B, 1, G * S, L)
        # The queries of a kv head stand in a row, so that keys and values need not be repeated for them.
        if n_new == 1:
            q = q.view(n_rows, -1, groups, size)  # (B, K, G, Dh)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
            return out.reshape(n_rows, 1, n_heads, -1)  # (B, 1, H, Dh)
        q = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, K, G * S, Dh)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        out = out.unflatten(2, (groups, -1))  # (B, K, G, S, Dh)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)  # (B, S, H, Dh)

    def prepare(self, mask: Mask, seq_len: int, device: torch.device) -> None:
        """See `InnerAttention.prepare`."""
        if self.cache.is_empty:
            self.inner.prepare(mask, seq_len, device)

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def _room(self, new: Tensor) -> Tensor:
        n_rows, _, n_heads, size = new.shape
        # Zeros: a value that nothing attends to is multiplied by 0, and must be a number for that.
        return new.new_zeros(n_rows, n_heads, self.cache.capacity, size)  # (B, K, capacity, Dh)

    def _store(self, kept: Tensor, new: Tensor) -> None:
        start = self.cache.common_start
        if start is not None:
            kept[:, :, start : start + new.shape[1]] = new.transpose(1, 2)
        else:
            kept[self.cache.rows, :, self.cache.positions] = new


@contextmanager
def cached(model: nn.Module, cache: KVCache) -> Iterator[None]:
    """Put a `CachedAttention` in the place of every attention backend of ``model``, and the backend back afterwards."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, InnerAttention)
    ]
    try:
        for parent, name, inner in found:
            setattr(parent, name, CachedAttention(inner, cache))
        yield
    finally:
        for parent, name, inner in found:
            setattr(parent, name, inner)
