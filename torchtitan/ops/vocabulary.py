"""A vocabulary that is divided over ranks: which entries are here, and sums over all of them."""

# Shapes: "..." any dimensions; V vocabulary.

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.ops.collectives import all_gather, all_reduce


def localize(ids: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """``(...) -> 2 x (...)``: rows of a table that begins at entry ``start`` (0 where the entry is not in it), and whether it is."""
    local = ids - start
    here = (local >= 0) & (local < size)
    return local.where(here, 0), here


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's entries, ``start`` to ``start + size``.

    Attributes:
        group: the ranks that together have the vocabulary.
        start: first entry.
        size: number of entries; it may differ between ranks.
        total: number of entries of all ranks.
    """

    group: dist.ProcessGroup
    start: int
    size: int
    total: int

    def localize(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `localize`."""
        return localize(ids, self.start, self.size)

    def sum(self, x: Tensor) -> Tensor:
        """Add ``x`` up over the ranks: ``(...) -> (...)``."""
        return all_reduce(x, self.group)

    def max(self, x: Tensor) -> Tensor:
        """The largest ``x`` of the ranks: ``(...) -> (...)``."""
        return all_reduce(x, self.group, op="max")

    def gather(self, logits: Tensor) -> Tensor:
        """``(..., V/tp) -> (..., V)``, laid end to end by rank; all ranks but the last ones have equally many entries."""
        widest = -(-self.total // self.group.size())
        padded = F.pad(logits, (0, widest - self.size))
        return all_gather(padded, logits.ndim - 1, self.group)[..., : self.total]

    def reduce(self, log_norm: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the ranks' parts of a softmax over the vocabulary: ``2 x (...) -> 2 x (...)``, in two all-reduces.

        Args:
            log_norm: logarithm of the sum of this rank's exponentials, float32.
            target: the target's logit where it is here, 0 elsewhere.

        Returns:
            Both over the whole vocabulary.
        """
        largest = self.max(log_norm)
        parts = log_norm.new_empty((2, *log_norm.shape))
        parts[0] = (log_norm - largest).exp()
        parts[1] = target
        sums = all_reduce(parts, self.group)
        return largest + sums[0].log(), sums[1]


def below_largest(logits: Tensor, vocabulary: VocabularyShard | None) -> Tensor:
    """Subtract each row's largest logit of the whole vocabulary, ``(C, V/tp) -> (C, 1)``, in place; return it.

    What follows is not larger than the logarithm of the vocabulary, so that float32 rounds the normaliser by 1e-6 at most;
    of logits as they are, it rounds all probabilities by that much of their size, which a divergence multiplies.
    """
    top = logits.amax(dim=1, keepdim=True)
    if vocabulary is not None:
        top = vocabulary.max(top)
    logits.sub_(top)
    return top
