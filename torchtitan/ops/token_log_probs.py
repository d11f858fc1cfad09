"""Log-probabilities and entropies of tokens, for objectives that are functions of them; logits exist a chunk at a time."""

# Shapes: T tokens, D dim, V vocabulary, C tokens of a chunk. "/tp" = local to a TP rank.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.ops.chunked_head import (
    Accumulation,
    HeadGradients,
    cap,
    cap_slope,
    check_shapes,
    chunks,
    counted,
)
from torchtitan.ops.vocabulary import VocabularyShard, below_largest, localize


class TokenLogProbs(NamedTuple):
    """What the head says of each token; 0 where the label is `IGNORE_INDEX`.

    Attributes:
        log_probs: ``(T,)`` float32, of the labels.
        entropies: ``(T,)`` float32, of the distributions they were chosen from, in nats.
    """

    log_probs: Tensor
    entropies: Tensor


def token_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int = 1024,
    vocabulary: VocabularyShard | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    accumulation: Accumulation = "float32",
) -> TokenLogProbs:
    """``log softmax(logits / temperature)[label]`` and the entropy of that softmax, for each token; both have gradients.

    Their gradient is not known before the objective is computed, so the backward makes each chunk's logits again: one more
    product of states and weight than `torchtitan.ops.linear_cross_entropy`, and the same memory. Tokens that do not
    count are dropped before the projection. With a divided vocabulary, as there, the gradient of ``hidden_states`` is this
    rank's summand.

    Args:
        hidden_states: ``(T, D)``.
        weight: ``(V/tp, D)``, in the type of ``hidden_states``.
        labels: ``(T,)`` int64, entries of the whole vocabulary, or `IGNORE_INDEX`.
        chunk_tokens: C.
        vocabulary: which entries ``weight`` has; None for all.
        softcap: bound of the logits, before the temperature; None for none.
        temperature: the logits are divided by it: that of the sampler whose tokens these are.
        accumulation: type in which the weight's gradient is added up.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    check_shapes(hidden_states, weight, labels)
    kept = counted(labels)
    if kept is not None:
        hidden_states, some = hidden_states.index_select(0, kept), labels[kept]
    else:
        some = labels
    form = _Form(some, vocabulary, softcap, temperature)
    found = _TokenLogProbs.apply(hidden_states, weight, form, chunk_tokens, accumulation)
    if kept is not None:
        found = tuple(x.new_zeros(len(labels)).index_copy(0, kept, x) for x in found)
    return TokenLogProbs(*found)


@dataclass(frozen=True, slots=True)
class _Form:
    labels: Tensor
    vocabulary: VocabularyShard | None
    softcap: float | None
    temperature: float

    def local(self, rows: slice, size: int) -> tuple[Tensor, Tensor]:
        start = 0 if self.vocabulary is None else self.vocabulary.start
        return localize(self.labels[rows, None], start, size)  # 2 x (C, 1)

    def statistics(self, raw: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """``(C, V/tp) -> 4 x (C, 1)``: largest logit, normaliser of those less it, log-probability and entropy."""
        logits = cap(raw, self.softcap).div_(self.temperature)
        top = below_largest(logits, self.vocabulary)
        label, here = self.local(rows, logits.shape[1])
        log_norm = logits.logsumexp(dim=1, keepdim=True)
        target = logits.gather(1, label).where(here, 0)
        if self.vocabulary is not None:
            log_norm, target = self.vocabulary.reduce(log_norm, target)
        mean = ((logits - log_norm).exp_().mul_(logits)).sum(dim=1, keepdim=True)
        if self.vocabulary is not None:
            mean = self.vocabulary.sum(mean)
        return top, log_norm, target - log_norm, log_norm - mean

    def gradient(
        self,
        raw: Tensor,
        rows: slice,
        top: Tensor,
        log_norm: Tensor,
        entropy: Tensor,
        grads: tuple[Tensor, ...],
    ) -> Tensor:
        """``(C, V/tp)`` gradient of the products.

        With ``p = softmax(l)``: ``d log p_y / d l = onehot(y) - p`` and ``d H / d l = -p (log p + H)``.
        """
        grad_log_prob, grad_entropy = grads  # 2 x (C, 1)
        logits = cap(raw, self.softcap)
        slope = cap_slope(logits, self.softcap)
        log_probs = logits.div_(self.temperature).sub_(top).sub_(log_norm)
        label, here = self.local(rows, log_probs.shape[1])
        probs = log_probs.exp()
        grad = (log_probs.add_(entropy).mul_(grad_entropy).add_(grad_log_prob)).mul_(probs).neg_()
        grad.scatter_add_(1, label, grad_log_prob * here).div_(self.temperature)
        return grad if slope is None else grad.mul_(slope)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        form: _Form,
        chunk_tokens: int,
        accumulation: Accumulation,
    ) -> tuple[Tensor, Tensor]:
        found = hidden_states.new_empty(4, len(hidden_states), 1, dtype=torch.float32)
        for rows in chunks(len(hidden_states), chunk_tokens):
            raw = (hidden_states[rows] @ weight.t()).float()  # (C, V/tp)
            found[:, rows] = torch.stack(form.statistics(raw, rows))
        top, log_norm, log_probs, entropies = found.unbind()  # 4 x (T, 1)
        ctx.save_for_backward(hidden_states, weight, top, log_norm, entropies)
        ctx.form, ctx.chunk_tokens, ctx.accumulation = form, chunk_tokens, accumulation
        return log_probs.flatten(), entropies.flatten()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_states, weight, top, log_norm, entropies = ctx.saved_tensors
        upstream = tuple(grad[:, None] for grad in grad_outputs)  # 2 x (T, 1)
        gradients = HeadGradients(
            hidden_states,
            weight,
            wanted=ctx.needs_input_grad[:2],
            accumulation=ctx.accumulation,
        )
        for rows in chunks(len(hidden_states), ctx.chunk_tokens):
            raw = (hidden_states[rows] @ weight.t()).float()
            here = tuple(grad[rows] for grad in upstream)
            grad = ctx.form.gradient(raw, rows, top[rows], log_norm[rows], entropies[rows], here)
            gradients.add(rows, grad)
            del raw, grad
        grad_weight = gradients.weight
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return gradients.hidden_states, grad_weight, None, None, None
