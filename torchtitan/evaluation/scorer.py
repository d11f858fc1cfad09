"""Log-likelihoods of tokens, given those before them; many sequences at a time."""

# Shapes: B rows of a batch, S tokens of its longest row, N scored tokens, V vocabulary, n tokens of a window.

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from torchtitan.models.decoder import Decoder

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]

_BATCHES_AHEAD = 32
"""Windows of so many batches are looked at together, so that those of similar length share a batch."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model sees at once.

    Attributes:
        tokens: ``(n,)``; the last one is predicted only.
        scored: ``(n,)``, which of them are asked for; not the first.
    """

    tokens: Ids
    scored: Flags


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model says of a window's scored tokens.

    Attributes:
        log_probs: ``(N,)`` float64, in nats.
        greedy: ``(N,)``, whether each is the likeliest.
    """

    log_probs: np.ndarray[tuple[int], np.dtype[np.float64]]
    greedy: Flags


def windows(tokens: Ids, scored: Flags, *, seq_len: int, stride: int) -> Iterator[Window]:
    """A document cut into windows, so that each token but the first is in one of them with tokens before it.

    The first window predicts ``seq_len`` tokens. Each further one goes on by ``stride`` tokens, and these have at least
    ``seq_len - stride`` others before them in the window; the last window is moved back to be as long as the others.

    Args:
        tokens: ``(n,)`` of the document.
        scored: ``(n,)``, those that are asked for.
        seq_len: tokens that the model gets.
        stride: 1 to ``seq_len``.
    """
    done = 1
    while done < len(tokens):
        end = min(len(tokens), seq_len + 1 if done == 1 else done + stride)
        start = max(0, end - seq_len - 1)
        asked = scored[start:end].copy()
        asked[: done - start] = False
        if asked.any():
            yield Window(tokens[start:end], asked)
        done = end


class Scorer:
    """Asks a model for the probabilities of given tokens.

    Args:
        model: with weights, whole, in evaluation mode.
        batch_rows: windows that it gets at once.
    """

    def __init__(self, model: Decoder, *, batch_rows: int = 8) -> None:
        self.model = model
        self.batch_rows = batch_rows

    def score(self, asked: Iterable[Window]) -> Iterator[Scores]:
        """The scores of each window, in order; each as if it were alone in its batch."""
        stream = iter(asked)
        while group := list(islice(stream, self.batch_rows * _BATCHES_AHEAD)):
            order = sorted(range(len(group)), key=lambda i: len(group[i].tokens), reverse=True)
            found: dict[int, Scores] = {}
            for first in range(0, len(order), self.batch_rows):
                rows = order[first : first + self.batch_rows]
                found.update(zip(rows, self._score([group[i] for i in rows]), strict=True))
            yield from (found[i] for i in range(len(group)))

    @torch.no_grad()
    def _score(self, rows: Sequence[Window]) -> Iterator[Scores]:
        device, head = self.model.head.weight.device, self.model.head
        seq_len = max(len(row.tokens) for row in rows) - 1
        tokens = np.zeros((len(rows), seq_len), dtype=np.int64)  # pads come last: nothing sees them
        places, labels = [], []
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens) - 1] = row.tokens[:-1]
            before = np.flatnonzero(row.scored[1:])
            places.append(number * seq_len + before)
            labels.append(row.tokens[1:][before])
        positions = torch.arange(seq_len, device=device).expand(len(rows), -1)
        hidden_states = self.model(torch.from_numpy(tokens).to(device), positions)  # (B, S, D)
        where = torch.from_numpy(np.concatenate(places)).to(device)  # (N,)
        wanted = torch.from_numpy(np.concatenate(labels)).to(device)  # (N,)
        log_probs, greedy = [], []
        for some, label in zip(
            where.split(head.chunk_tokens), wanted.split(head.chunk_tokens), strict=True
        ):
            logits = head.logits(hidden_states, some)  # (C, V)
            target = logits.gather(1, label[:, None])[:, 0]
            log_probs.append(target - logits.logsumexp(dim=1))
            greedy.append(logits.argmax(dim=1) == label)
        sizes = np.cumsum([len(each) for each in labels])[:-1]
        by_row = np.split(torch.cat(log_probs).double().cpu().numpy(), sizes)
        yield from map(Scores, by_row, np.split(torch.cat(greedy).cpu().numpy(), sizes))
