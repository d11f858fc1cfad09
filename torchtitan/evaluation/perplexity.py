"""How well a model predicts the texts and conversations of files."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from torchtitan.data.bad_rows import BadRowPolicy, bad_kinds
from torchtitan.data.chat.sample import Pack, Sample
from torchtitan.data.source import BadRow
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError, NumericsError
from torchtitan.evaluation.scorer import Scorer, Window, windows


@dataclass(slots=True)
class Perplexity:
    """Sums over documents, and what follows from them.

    Attributes:
        seq_len: tokens that the model got at once, at most.
        stride: tokens by which a window went on.
        documents: number of texts and conversations.
        tokens: of all of them.
        scored: those that were predicted: what training would learn, without a first token that has none before it.
        n_bytes: of the scored tokens' text in UTF-8; special tokens have none.
        nats: their negative log-likelihood.
        counts: rows that were left out, by reason.
    """

    seq_len: int
    stride: int
    documents: int = 0
    tokens: int = 0
    scored: int = 0
    n_bytes: int = 0
    nats: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(self.scored, 1)

    @property
    def perplexity(self) -> float:
        """The exponential of `loss`: of so many tokens the model has to choose, on average."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Does not depend on the tokenizer: bits in which the model would store a byte of the text."""
        return self.nats / math.log(2) / max(self.n_bytes, 1)

    def describe(self) -> str:
        """For a person."""
        return "\n".join(
            (
                f"{self.documents} documents of {self.tokens} tokens; {self.scored} of these predicted, {self.n_bytes} bytes",
                f"windows of {self.seq_len} tokens that go on by {self.stride}",
                f"loss {self.loss:.4f} nats per token | perplexity {self.perplexity:.4f} | "
                f"bits per byte {self.bits_per_byte:.4f} | byte perplexity {2**self.bits_per_byte:.4f}",
                f"left out: {bad_kinds(self.counts, 'dropped_')}; bad: {bad_kinds(self.counts)}",
            )
        )

    def numbers(self) -> dict[str, Any]:
        """For a program."""
        found = asdict(self) | {"counts": dict(self.counts)}
        found |= {"loss": self.loss, "perplexity": self.perplexity}
        return found | {
            "bits_per_byte": self.bits_per_byte,
            "byte_perplexity": 2**self.bits_per_byte,
        }


class Progress(Protocol):
    """Is told of the sums as they grow."""

    def __call__(self, so_far: Perplexity) -> None:
        """Called after each window."""
        ...


def measure(
    scorer: Scorer,
    tokenizer: Tokenizer,
    documents: Iterable[tuple[str, Pack | BadRow]],
    *,
    seq_len: int,
    stride: int,
    policy: BadRowPolicy | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Score documents, each by itself.

    Args:
        scorer: of the model.
        tokenizer: that made the documents' tokens.
        documents: see `torchtitan.data.source.documents`.
        seq_len: tokens that the model gets at once.
        stride: see `windows`.
        policy: what to do with bad rows; None skips some.
        progress: told after each window.

    Raises:
        DataError: if there is nothing to predict, or too many rows are bad.
        NumericsError: if a probability is not a number.
    """
    found, policy = Perplexity(seq_len, stride), policy or BadRowPolicy()
    names = [name for name in tokenizer.special_tokens if name in tokenizer.vocab]
    special = np.array([tokenizer.vocab[name] for name in names], dtype=np.int64)

    def asked() -> Iterator[Window]:
        for _, document in documents:
            if isinstance(document, BadRow):
                policy.meet(document, found.counts)
                policy.judge(found.counts)
                continue
            for sample in document.samples:
                found.documents += 1
                found.counts["documents"] += 1
                found.tokens += len(sample)
                found.n_bytes += _bytes_learned(sample, tokenizer, special)
                tokens = sample.tokens.astype(np.int64)
                yield from windows(tokens, sample.learned, seq_len=seq_len, stride=stride)

    for scores in scorer.score(asked()):
        found.scored += len(scores.log_probs)
        found.nats -= float(scores.log_probs.sum())
        if progress is not None:
            progress(found)
    if not found.scored:
        raise DataError(
            f"nothing is there to predict in {found.documents} documents; left out: "
            f"{bad_kinds(found.counts, 'dropped_')}; bad: {bad_kinds(found.counts)}"
        )
    if not math.isfinite(found.nats):
        raise NumericsError(
            f"the log-likelihood of {found.scored} tokens is {-found.nats}; the weights are broken, or --dtype is too small "
            "for them: try float32"
        )
    return found


def _bytes_learned(sample: Sample, tokenizer: Tokenizer, special: np.ndarray) -> int:
    """Bytes of the text that the predicted tokens stand for.

    A token's text can depend on those before it, so each run of them is what it adds to the text so far.
    """
    learned = sample.learned.copy()
    learned[0] = False
    edges = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0, append=0))
    text = ~np.isin(sample.tokens, special)

    def size(start: int, end: int) -> int:
        ids = sample.tokens[start:end][text[start:end]]
        return len(tokenizer.decode(ids.tolist()).encode("utf-8", "surrogatepass"))

    return sum(size(0, end) - size(0, start) for start, end in edges.reshape(-1, 2).tolist())
