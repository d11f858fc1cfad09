"""Divergence between a teacher's and a student's next-token distributions, from hidden states; logits exist a chunk at a time."""

# Shapes: T tokens, D dim of the student, D_t dim of the teacher, V vocabulary, C tokens of a chunk. "/tp" = local to a TP rank.

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchtitan.ops.chunked_head import (
    Accumulation,
    cap,
    cap_slope,
    check_shapes,
    counted,
    sum_over_tokens,
)
from torchtitan.ops.vocabulary import VocabularyShard, below_largest

Divergence = Literal["forward_kl", "reverse_kl", "js"]


def linear_distillation(
    hidden_states: Tensor,
    weight: Tensor,
    teacher_states: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    divergence: Divergence = "forward_kl",
    teacher_share: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    vocabulary: VocabularyShard | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    accumulation: Accumulation = "float32",
) -> Tensor:
    """Sum over the tokens that count of a divergence between teacher ``P`` and student ``Q``; gradients for the student.

    ``forward_kl`` is ``KL(P || Q)``, ``reverse_kl`` is ``KL(Q || P)``, ``js`` the generalised Jensen-Shannon divergence
    ``b KL(P || M) + (1 - b) KL(Q || M)`` with ``M = b P + (1 - b) Q`` (arXiv:2306.13649 section 2, equation 2). Both softmaxes are those of
    the logits over ``temperature``; nothing is multiplied by its square. As in `torchtitan.ops.linear_cross_entropy`,
    tokens that do not count are dropped before the projections, gradients are computed on the way, and with a divided
    vocabulary the gradient of ``hidden_states`` is this rank's summand.

    Args:
        hidden_states: ``(T, D)``, the student's.
        weight: ``(V/tp, D)``.
        teacher_states: ``(T, D_t)``; gets no gradient.
        teacher_weight: ``(V/tp, D_t)``, of the same entries as ``weight``; gets no gradient.
        labels: ``(T,)``; only whether one is `IGNORE_INDEX` matters.
        divergence: which.
        teacher_share: b, for ``js``, between 0 and 1.
        temperature: of both softmaxes.
        chunk_tokens: C; a chunk has logits of both: about ``4 * 4 * C * V`` bytes.
        vocabulary: which entries the weights have; None for all.
        softcap: bound of the student's logits; None for none.
        teacher_softcap: bound of the teacher's.
        accumulation: type in which the weight's gradient is added up.

    Returns:
        Scalar, float32. 0 if no token counts.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    check_shapes(hidden_states, weight, labels)
    check_shapes(teacher_states, teacher_weight, labels)
    if len(teacher_weight) != len(weight):
        raise ValueError(
            f"the teacher's weight has {len(teacher_weight)} entries of the vocabulary and the student's {len(weight)}; "
            "distil between models with the same vocabulary, padded alike"
        )
    kept = counted(labels)
    if kept is not None:
        hidden_states = hidden_states.index_select(0, kept)
        teacher_states = teacher_states.index_select(0, kept)
    terms = _Terms(
        teacher_states.detach(),
        teacher_weight.detach(),
        vocabulary,
        divergence,
        teacher_share,
        temperature,
        softcap,
        teacher_softcap,
    )
    return sum_over_tokens(
        hidden_states, weight, terms, chunk_tokens=chunk_tokens, accumulation=accumulation
    )


@dataclass(frozen=True, slots=True)
class _Terms:
    """See `ChunkTerms`."""

    teacher_states: Tensor
    teacher_weight: Tensor
    vocabulary: VocabularyShard | None
    divergence: Divergence
    teacher_share: float
    temperature: float
    softcap: float | None
    teacher_softcap: float | None

    def __call__(self, raw: Tensor, rows: slice, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
        teacher_raw = (self.teacher_states[rows] @ self.teacher_weight.t()).float()  # (C, V/tp)
        teacher = self._log_softmax(cap(teacher_raw, self.teacher_softcap))
        logits = cap(raw, self.softcap)
        slope = cap_slope(logits, self.softcap) if gradient else None
        student = self._log_softmax(logits)
        if self.divergence == "forward_kl":
            value, grad = self._forward_kl(teacher, student, gradient)
        elif self.divergence == "reverse_kl":
            value, grad = self._towards(student, teacher, 1.0)
        else:
            value, grad = self._js(teacher, student)
        if not gradient or grad is None:
            return value.sum(), None
        grad.div_(self.temperature)
        return value.sum(), grad if slope is None else grad.mul_(slope)

    def _forward_kl(
        self, teacher: Tensor, student: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``d KL(P || Q) / d l = q - p``."""
        probs = teacher.exp()
        value = self._sum((teacher - student).mul_(probs))
        return value, student.exp().sub_(probs) if gradient else None

    def _js(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        b = self.teacher_share
        logs = torch.tensor([b, 1 - b], device=student.device).log()
        mixture = torch.logaddexp(teacher + logs[0], student + logs[1])
        value = b * self._sum((teacher - mixture).mul_(teacher.exp()))
        to_mixture, grad = self._towards(student, mixture, 1 - b)
        return value + to_mixture, grad

    def _towards(self, student: Tensor, other: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """``factor * KL(Q || R)`` and ``factor * q (log(q / r) - KL)``.

        That is its gradient, and for ``R = M`` the gradient of the whole JS divergence: what the change of M adds cancels.
        """
        probs = student.exp()
        log_ratio = student - other
        value = self._sum(log_ratio * probs)  # (C, 1)
        return factor * value, log_ratio.sub_(value).mul_(probs).mul_(factor)

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """``(C, V/tp)``, normalised over the whole vocabulary, in place."""
        below_largest(logits.div_(self.temperature), self.vocabulary)
        log_norm = logits.logsumexp(dim=1, keepdim=True)
        if self.vocabulary is not None:
            log_norm, _ = self.vocabulary.reduce(log_norm, torch.zeros_like(log_norm))
        return logits.sub_(log_norm)

    def _sum(self, terms: Tensor) -> Tensor:
        """``(C, V/tp) -> (C, 1)``, over the whole vocabulary."""
        total = terms.sum(dim=1, keepdim=True)
        return total if self.vocabulary is None else self.vocabulary.sum(total)
