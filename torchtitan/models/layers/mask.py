"""Which tokens may attend to which: a description, from which each backend makes what it needs."""

# Shapes: B batch, S sequence.

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Mask:
    """Causal attention within documents, within a window.

    A query attends to a key when the key is not later, both have the same document id, and the key is less than
    ``window`` tokens back. What a backend derives from it is kept, so all layers of a forward share one copy.

    Args:
        document_ids: ``(B, S)``, equal within a document, rising along each row; None when every row is one
            document.
        causal: False lets a query attend to later keys too.
        window: number of keys that a query sees, itself included; None for all.
    """

    def __init__(
        self, document_ids: Tensor | None = None, *, causal: bool = True, window: int | None = None
    ) -> None:
        self.document_ids = document_ids
        self.causal = causal
        self.window = window
        self._windowed: dict[int | None, Mask] = {window: self}
        self.derived: dict[str, Any] = {}
        """What backends have made of this mask, under names of theirs; all layers of a forward share it."""

    def windowed(self, window: int | None) -> "Mask":
        """The same mask with another window."""
        if window not in self._windowed:
            self._windowed[window] = Mask(self.document_ids, causal=self.causal, window=window)
        return self._windowed[window]

    @cached_property
    def document_lengths(self) -> list[int] | None:
        """Lengths of the documents of all rows in order, summing to B * S; None when every row is one document.

        Reads ``document_ids`` on the host: for CPU backends.
        """
        if self.document_ids is None:
            return None
        batch, seq = self.document_ids.shape
        starts = torch.ones_like(self.document_ids, dtype=torch.bool)
        starts[:, 1:] = self.document_ids[:, 1:] != self.document_ids[:, :-1]
        offsets = starts.flatten().nonzero().squeeze(1)  # sync: free on CPU
        if len(offsets) == batch:
            return None
        return torch.diff(offsets, append=offsets.new_tensor([batch * seq])).tolist()

    def dense(self, seq_len: int, device: torch.device) -> Tensor:
        """True where a query (rows) may see a key (columns): ``(B or 1, 1, S, S)`` bool."""
        if "_dense" not in self.__dict__:
            self._dense = self._make_dense(seq_len, device)
        return self._dense

    def _make_dense(self, seq_len: int, device: torch.device) -> Tensor:
        position = torch.arange(seq_len, device=device)
        back = (
            position[:, None] - position[None, :]
        )  # (S, S), how far the key lies behind the query
        allowed = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (back < self.window)
            if not self.causal:
                allowed = allowed & (back > -self.window)
        allowed = allowed[None]  # (1, S, S)
        if self.document_ids is not None:
            same = self.document_ids[:, :, None] == self.document_ids[:, None, :]  # (B, S, S)
            allowed = allowed & same
        return allowed[:, None]  # (B or 1, 1, S, S)
