"""Cross-entropy of a linear projection, without ever holding the logits of all tokens."""

# Shapes: T tokens, D dim, V vocabulary, C tokens of a chunk. "/tp" = local to a TP rank.

from typing import Any

import torch
from torch import Tensor

from torchtitan.batch import IGNORE_INDEX
from torchtitan.ops.vocabulary import VocabularyShard


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int = 1024,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """Sum over tokens of ``-log softmax(hidden_states @ weight.T)[label]``.

    Tokens are walked in chunks. The gradients are computed on the way, while a chunk's logits are at hand, so the
    largest temporary is one chunk of logits in float32, ``4 * C * V`` bytes, whatever T is. Softmax and sums are in
    float32; the weight's gradient is accumulated in float32.

    With a divided vocabulary each rank computes its own entries' logits, and two all-reduces of a few numbers a token make
    the softmax whole (loss parallel, arXiv:1909.08053 section 3). The loss is the same on all ranks; the gradient of
    ``hidden_states`` is this rank's summand, which the caller adds up where it made the hidden states whole.

    Args:
        hidden_states: ``(T, D)``, the same on all ranks of ``vocabulary``.
        weight: ``(V/tp, D)``, in the type of ``hidden_states``.
        labels: ``(T,)`` int64, entries of the whole vocabulary; `IGNORE_INDEX` where a token does not count.
        chunk_tokens: C.
        vocabulary: which entries ``weight`` has; None for all.

    Returns:
        Scalar, float32. 0 if no token counts.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    if hidden_states.ndim != 2 or labels.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)} and labels {tuple(labels.shape)} "
            "do not fit; pass (T, D) and (T,)"
        )
    if weight.shape[1] != hidden_states.shape[1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} has another width than "
            f"hidden_states {tuple(hidden_states.shape)}; pass (V, D) and (T, D)"
        )
    return _LinearCrossEntropy.apply(hidden_states, weight, labels, chunk_tokens, vocabulary)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        vocabulary: VocabularyShard | None,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = hidden_states.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden_states) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden_states.shape[0], chunk_tokens):
            hidden = hidden_states[start : start + chunk_tokens]  # (C, D)
            label = labels[start : start + chunk_tokens]  # (C,)
            counts = label != IGNORE_INDEX
            label = label.where(counts, 0)[:, None]  # (C, 1)
            here = torch.ones_like(label, dtype=torch.bool)  # (C, 1)
            if vocabulary is not None:
                label, here = vocabulary.localize(label)
            logits = (hidden @ weight.t()).float()  # (C, V/tp)
            log_norm = logits.logsumexp(dim=-1, keepdim=True)  # (C, 1)
            target = logits.gather(1, label).where(here, 0)  # (C, 1)
            if vocabulary is not None:
                log_norm, target = vocabulary.reduce(log_norm, target)
            token_loss = (log_norm - target).squeeze(1)  # (C,)
            loss += token_loss.where(counts, 0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = logits.sub_(log_norm).exp_()  # (C, V/tp): softmax
            grad_logits.scatter_add_(1, label, -here.float())
            grad_logits.masked_fill_(~counts[:, None], 0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + chunk_tokens])
            if grad_weight is not None:
                if hidden.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), hidden)
                else:
                    grad_weight += grad_logits.t() @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None
