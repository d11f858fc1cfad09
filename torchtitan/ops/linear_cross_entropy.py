"""Cross-entropy of a linear projection, without ever holding the logits of all tokens."""

# Shapes: T tokens that count, D dim, V vocabulary, C tokens of a chunk, W entries of a chunk. "/tp" = local to a TP rank.

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.ops.chunked_head import (
    Accumulation,
    cap,
    cap_slope,
    check_shapes,
    chunks,
    counted,
    scaled,
    sum_over_tokens,
)
from torchtitan.ops.vocabulary import VocabularyShard, localize

WeightGradient = Accumulation | Literal["by_vocabulary"]
"""How the gradient of a head's weight comes about; see `linear_cross_entropy`."""


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int = 1024,
    vocabulary: VocabularyShard | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    weight_gradient: WeightGradient = "float32",
    fused: bool = False,
) -> Tensor:
    """Sum over the tokens that count of ``-log softmax(hidden_states @ weight.T)[label]``.

    Tokens whose label is `IGNORE_INDEX` are dropped before the projection. The rest is walked in chunks, and the
    gradients are computed on the way, while a chunk's logits are at hand: the largest temporary is one chunk of logits
    in float32 and once more in the type of ``weight``, ``(4 + b) * C * V`` bytes, whatever T is. Softmax and sums are in
    float32.

    With a divided vocabulary each rank computes its own entries' logits, and two all-reduces of a few numbers a token make
    the softmax whole (loss parallel, arXiv:1909.08053 section 3). The loss is the same on all ranks; the gradient of
    ``hidden_states`` is this rank's summand, which the caller adds up where it made the hidden states whole.

    Args:
        hidden_states: ``(T, D)``, the same on all ranks of ``vocabulary``.
        weight: ``(V/tp, D)``, in the type of ``hidden_states``.
        labels: ``(T,)`` int64, entries of the whole vocabulary; `IGNORE_INDEX` where a token does not count.
        chunk_tokens: C.
        vocabulary: which entries ``weight`` has; None for all.
        softcap: bound of the logits, see `torchtitan.ops.chunked_head.cap`; None for none. Costs another ``4 * C * V`` bytes.
        z_loss: weight of ``log(sum(exp(logits)))^2``, which keeps the softmax's normaliser near 1 (PaLM, arXiv:2204.02311
            section 5); 1e-4 is usual.
        label_smoothing: part of the target that is spread evenly over the vocabulary (arXiv:1512.00567 section 7), 0 to 1.
        weight_gradient: ``float32`` adds the chunks up in float32, ``4 * V * D`` bytes; ``weight_dtype`` in the type of
            ``weight``, which loses digits where that is bfloat16; ``by_vocabulary`` walks the vocabulary instead of the
            tokens (W = C * V / T entries at once), so that each part of the gradient is one matmul and is never added up
            outside of it: no sum in float32, exact, and one more product of states and weight.
        fused: compile what is done with a chunk's logits, so that they are passed over fewer times.

    Returns:
        Scalar, float32. 0 if no token counts.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    check_shapes(hidden_states, weight, labels)
    kept = counted(labels)
    if kept is not None:
        hidden_states, labels = hidden_states.index_select(0, kept), labels[kept]
    n_entries = len(weight) if vocabulary is None else vocabulary.total
    form = _Form(softcap, z_loss, label_smoothing, n_entries, fused)
    if weight_gradient == "by_vocabulary":
        wanted = torch.is_grad_enabled()
        return _ByVocabulary.apply(
            hidden_states, weight, labels, form, chunk_tokens, vocabulary, wanted
        )
    return sum_over_tokens(
        hidden_states,
        weight,
        _Terms(labels, vocabulary, form),
        chunk_tokens=chunk_tokens,
        accumulation=weight_gradient,
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """What is computed of logits ``l`` and a label ``y``; ``t = (1 - s) onehot(y) + s / V`` with the smoothing ``s``.

    The loss is ``L - t.l + z L^2`` with ``L = logsumexp(l)``, its gradient ``(1 + 2 z L) softmax(l) - t``.
    """

    softcap: float | None
    z_loss: float
    smoothing: float
    n_entries: int
    fused: bool

    def statistics(
        self, raw: Tensor, label: Tensor, here: Tensor, *, gradient: bool
    ) -> tuple["_Exponentials", Tensor, Tensor]:
        """``(C, W), 2 x (C, 1) -> (C, W), 2 x (C, 1)``: what the gradient is made of, and of these entries L and t.l."""
        run = _compiled(_statistics) if self.fused else _statistics
        values, top, slope, log_norm, target = run(
            raw, label, here, self.softcap, self.smoothing, self.n_entries, gradient
        )
        return _Exponentials(values, top, slope), log_norm, target

    def loss(self, log_norm: Tensor, target: Tensor) -> Tensor:
        """``2 x (C, 1) -> ()``: the sum over the tokens."""
        return (log_norm - target + self.z_loss * log_norm.square()).sum()

    def gradient(
        self, exponentials: "_Exponentials", log_norm: Tensor, label: Tensor, here: Tensor
    ) -> Tensor:
        """``(C, W), 3 x (C, 1) -> (C, W)`` gradient of the loss with respect to the products, in place."""
        run = _compiled(_gradient) if self.fused else _gradient
        return run(
            *exponentials, log_norm, label, here, self.z_loss, self.smoothing, self.n_entries
        )


class _Exponentials(NamedTuple):
    """What is left of a chunk's logits ``l`` until the whole softmax is known."""

    values: Tensor
    """``(C, W)``: ``exp(l - top)``, in place of the logits."""
    top: Tensor
    """``(C, 1)``: the largest logit here."""
    slope: Tensor | None
    """``(C, W)``: of the cap."""


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph for chunks of all sizes."""
    return torch.compile(function, dynamic=True)


def _statistics(
    raw: Tensor,
    label: Tensor,
    here: Tensor,
    softcap: float | None,
    smoothing: float,
    n_entries: int,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    logits = cap(raw, softcap)
    target = logits.gather(1, label).where(here, 0)
    if smoothing:
        spread = smoothing / n_entries
        target = (1 - smoothing) * target + spread * logits.sum(dim=1, keepdim=True)
    slope = cap_slope(logits, softcap) if gradient else None
    top = logits.amax(dim=1, keepdim=True)
    values = logits.sub_(top).exp_()
    log_norm = values.sum(dim=1, keepdim=True).log_().add_(top)
    return values, top, slope, log_norm, target


def _gradient(
    values: Tensor,
    top: Tensor,
    slope: Tensor | None,
    log_norm: Tensor,
    label: Tensor,
    here: Tensor,
    z_loss: float,
    smoothing: float,
    n_entries: int,
) -> Tensor:
    grad = values.mul_((top - log_norm).exp_() * (1 + 2 * z_loss * log_norm))
    if smoothing:
        grad.sub_(smoothing / n_entries)
    grad.scatter_add_(1, label, here.float() * (smoothing - 1))
    return grad if slope is None else grad.mul_(slope)


@dataclass(frozen=True, slots=True)
class _Terms:
    """See `ChunkTerms`."""

    labels: Tensor
    vocabulary: VocabularyShard | None
    form: _Form

    def __call__(self, raw: Tensor, rows: slice, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
        start = 0 if self.vocabulary is None else self.vocabulary.start
        label, here = localize(self.labels[rows, None], start, raw.shape[1])  # (C, 1)
        kept, log_norm, target = self.form.statistics(raw, label, here, gradient=gradient)
        if self.vocabulary is not None:
            log_norm, target = self.vocabulary.reduce(log_norm, target)
        loss = self.form.loss(log_norm, target)
        return loss, self.form.gradient(kept, log_norm, label, here) if gradient else None


class _ByVocabulary(torch.autograd.Function):
    """The vocabulary is walked twice: for the softmax's normaliser, and for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        form: _Form,
        chunk_tokens: int,
        vocabulary: VocabularyShard | None,
        grad_mode: bool,
    ) -> Tensor:
        needs_hidden, needs_weight = (grad_mode and n for n in ctx.needs_input_grad[:2])
        n_tokens, first = len(labels), 0 if vocabulary is None else vocabulary.start
        entries = list(chunks(len(weight), max(1, chunk_tokens * len(weight) // max(1, n_tokens))))

        def part(some: slice, *, gradient: bool) -> tuple[Any, ...]:
            """Statistics of the ``(T, W)`` logits of some entries, and the labels among them."""
            label, here = localize(labels[:, None], first + some.start, some.stop - some.start)
            raw = (hidden_states @ weight[some].t()).float()
            return *form.statistics(raw, label, here, gradient=gradient), label, here

        log_norm = hidden_states.new_full((n_tokens, 1), -torch.inf, dtype=torch.float32)
        target = torch.zeros_like(log_norm)
        for some in entries:
            _, norm_here, target_here, *_ = part(some, gradient=False)
            log_norm = torch.logaddexp(log_norm, norm_here)
            target += target_here
        if vocabulary is not None:
            log_norm, target = vocabulary.reduce(log_norm, target)
        grad_hidden = torch.zeros_like(hidden_states, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for some in entries if needs_hidden or needs_weight else ():
            kept, _, _, label, here = part(some, gradient=True)
            grad_logits = form.gradient(kept, log_norm, label, here).to(weight.dtype)  # (T, W)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ weight[some]
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden_states, out=grad_weight[some])
            del kept, grad_logits  # before the next part's
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return form.loss(log_norm, target)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grads = (scaled(saved, grad_outputs[0], ctx.dtype) for saved in ctx.saved_tensors)
        return *grads, None, None, None, None, None
