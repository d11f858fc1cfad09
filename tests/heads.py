"""Random problems of an output head, and the dense computation of what its operations must give."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.batch import IGNORE_INDEX
from torchtitan.ops.linear_cross_entropy import linear_cross_entropy
from torchtitan.ops.linear_distillation import linear_distillation
from torchtitan.ops.token_log_probs import token_log_probs
from torchtitan.ops.vocabulary import VocabularyShard


def case(tokens, dim=8, vocab=13, masked=0.3, seed=0):
    """States and weight that need gradients, and labels of which a part is ignored."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=g).requires_grad_()
    weight = torch.randn(vocab, dim, generator=g).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < masked] = IGNORE_INDEX
    return hidden, weight, labels


def dense_logits(hidden, weight, softcap, temperature=1.0):
    raw = hidden.double() @ weight.double().t()
    return (raw if softcap is None else softcap * (raw / softcap).tanh()) / temperature


def dense_cross_entropy(hidden, weight, labels, *, softcap, z_loss, label_smoothing):
    logits = dense_logits(hidden, weight, softcap)
    loss = F.cross_entropy(
        logits, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )
    norms = logits.logsumexp(-1)[labels != IGNORE_INDEX]
    return loss + z_loss * norms.square().sum()


def dense_log_probs(hidden, weight, labels, *, softcap, temperature):
    log_softmax = dense_logits(hidden, weight, softcap, temperature).log_softmax(-1)
    counts = labels != IGNORE_INDEX
    log_probs = log_softmax.gather(1, labels.where(counts, 0)[:, None]).squeeze(1).where(counts, 0)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1).where(counts, 0)


def dense_divergence(p, q, divergence, b):
    """Of rows of log-probabilities of the teacher and the student; ``(T,)``."""

    def kl(a, c):
        return (a.exp() * (a - c)).sum(-1)

    if divergence == "forward_kl":
        return kl(p, q)
    if divergence == "reverse_kl":
        return kl(q, p)
    m = (b * p.exp() + (1 - b) * q.exp()).log()
    return b * kl(p, m) + (1 - b) * kl(q, m)


def check_equal(draw, rank=0, world=1):
    """Compare each operation on a random problem with its dense computation, to 1e-5 in value and gradients.

    Args:
        draw: a `random.Random`, in the same state on all ranks.
        rank: whose part of the vocabulary is used.
        world: ranks that share it; above 1 they are those of the default process group.
    """
    tokens, dim, chunk = draw.randint(0, 30), draw.randint(1, 9), draw.randint(1, 40)
    vocab, masked = draw.randint(world, 23), draw.choice([0.0, 0.3, 1.0])
    hidden, weight, labels = case(tokens, dim, vocab, masked, draw.randint(0, 10**6))
    bounds = sorted([0, vocab, *draw.sample(range(1, vocab), world - 1)])  # uneven at will
    mine = slice(bounds[rank], bounds[rank + 1])
    part = weight.detach()[mine].clone().requires_grad_()
    shard = None
    if world > 1:
        shard = VocabularyShard(dist.group.WORLD, mine.start, mine.stop - mine.start, vocab)
    softcap = draw.choice([None, 2.0])
    common = {"chunk_tokens": chunk, "vocabulary": shard, "softcap": softcap}

    def compare(got, want):
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
        got_hidden, got_part = torch.autograd.grad(0.5 * got, (hidden, part))
        if world > 1:
            dist.all_reduce(got_hidden)
        want_hidden, want_weight = torch.autograd.grad(
            0.5 * want, (hidden, weight), retain_graph=True
        )
        torch.testing.assert_close(got_hidden, want_hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_part, want_weight[mine], rtol=1e-5, atol=1e-5)

    extras = {"z_loss": draw.choice([0.0, 0.01]), "label_smoothing": draw.choice([0.0, 0.1])}
    want = dense_cross_entropy(hidden, weight, labels, softcap=softcap, **extras)
    for how in ("float32", "weight_dtype", "by_vocabulary"):
        got = linear_cross_entropy(hidden, part, labels, weight_gradient=how, **extras, **common)
        compare(got, want)

    temperature = draw.choice([1.0, 0.7])
    upstream = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1))
    found = token_log_probs(hidden, part, labels, temperature=temperature, **common)
    dense = dense_log_probs(hidden, weight, labels, softcap=softcap, temperature=temperature)
    # Both are differences of numbers as large as the logits, which leave float32's error of those.
    atol = 1e-5 + 1e-6 * float((hidden @ weight.t()).detach().abs().max()) if tokens else 0.0
    for a, b in zip(found, dense, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=atol)
    compare(
        (torch.stack(tuple(found)) * upstream).sum(), (torch.stack(tuple(dense)) * upstream).sum()
    )

    teacher, teacher_weight, _ = case(tokens, dim + 1, vocab, 0, draw.randint(0, 10**6))
    divergence, b = draw.choice(["forward_kl", "reverse_kl", "js"]), draw.choice([0.1, 0.5, 0.9])
    got = linear_distillation(
        hidden,
        part,
        teacher,
        teacher_weight.detach()[mine],
        labels,
        divergence=divergence,
        teacher_share=b,
        temperature=temperature,
        **common,
    )
    p = dense_logits(teacher, teacher_weight, None, temperature).log_softmax(-1).detach()
    q = dense_logits(hidden, weight, softcap, temperature).log_softmax(-1)
    compare(got, dense_divergence(p, q, divergence, b).where(labels != IGNORE_INDEX, 0).sum())
