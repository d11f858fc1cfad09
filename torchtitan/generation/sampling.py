"""How the next token is chosen."""

# Shapes: B batch rows, V vocabulary.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.config.configurable import Configurable, Problem


class Sampling(Configurable):
    """Draws the next tokens of some rows, each with random numbers of its own.

    Settings act in the order and with the meaning of ``transformers``: repetition penalty, temperature, top-k, top-p, min-p.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Sampling`."""

        temperature: float = 1.0
        """The logits are divided by it; 0 always takes the likeliest token (greedy)."""
        top_k: int | None = None
        """Choose among the k likeliest tokens; None for all."""
        top_p: float = 1.0
        """Choose among the likeliest tokens that together have this probability (arXiv:1904.09751)."""
        min_p: float = 0.0
        """Leave out tokens less likely than this part of the likeliest's probability (arXiv:2407.01082)."""
        repetition_penalty: float = 1.0
        """Divides the positive and multiplies the negative logits of tokens that are there already (arXiv:1909.05858)."""
        seed: int = 0
        """Row i draws from a stream that starts with seed + i, whatever else is in its batch."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.temperature < 0:
                yield Problem("temperature", self.temperature, "is negative", "set 0 for greedy")
            if self.top_k is not None and self.top_k < 1:
                yield Problem("top_k", self.top_k, "is not positive", "set None for all tokens")
            if not 0 < self.top_p <= 1:
                yield Problem(
                    "top_p", self.top_p, "is not above 0 and up to 1", "set 1 for all tokens"
                )
            if not 0 <= self.min_p <= 1:
                yield Problem("min_p", self.min_p, "is not between 0 and 1", "set 0 for all tokens")
            if self.repetition_penalty <= 0:
                yield Problem(
                    "repetition_penalty",
                    self.repetition_penalty,
                    "is not positive",
                    "set 1 for none",
                )

        def build(self) -> "Sampling":
            """Make the sampler."""
            return Sampling(self)

    def __init__(self, config: Config) -> None:
        self.config = config

    def generators(self, n_rows: int) -> list[torch.Generator]:
        """A stream of random numbers for each row."""
        return [torch.Generator().manual_seed(self.config.seed + i) for i in range(n_rows)]

    def __call__(
        self,
        logits: Tensor,
        histories: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
    ) -> list[int]:
        """The next token of each row.

        Args:
            logits: ``(B, V)`` float32; may be overwritten.
            histories: each row's tokens so far, prompt included.
            generators: each row's random numbers; greedy rows draw none.
        """
        if self.config.repetition_penalty != 1:
            logits = self._penalised(logits, histories)
        if self.config.temperature == 0:
            return logits.argmax(dim=-1).tolist()  # sync: the tokens
        probs = self.probabilities(logits)
        cumulative = probs.double().cumsum(dim=-1)  # (B, V)
        draws = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        wanted = draws.to(logits.device) * cumulative[:, -1:]  # (B, 1)
        found = torch.searchsorted(cumulative, wanted, right=True)  # the first that goes beyond
        return found.squeeze(1).tolist()  # sync: the tokens

    def probabilities(self, logits: Tensor) -> Tensor:
        """``(B, V) -> (B, V)``: what is drawn from, at a temperature above 0."""
        config = self.config
        logits = logits / config.temperature
        if config.top_k is not None and config.top_k < logits.shape[-1]:
            least = logits.topk(config.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if config.top_p < 1:
            ascending, order = logits.sort(dim=-1)
            unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - config.top_p
            unlikely[:, -1] = False
            unlikely = torch.empty_like(unlikely).scatter_(1, order, unlikely)
            logits = logits.masked_fill(unlikely, -torch.inf)
        probs = logits.softmax(dim=-1)
        if config.min_p > 0:
            least = config.min_p * probs.amax(dim=-1, keepdim=True)
            probs = probs.masked_fill(probs < least, 0)
        return probs

    def _penalised(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        for row, history in zip(logits, histories, strict=True):
            seen = torch.tensor(sorted(set(history)), dtype=torch.int64, device=logits.device)
            found = row[seen]
            penalty = self.config.repetition_penalty
            row[seen] = torch.where(found > 0, found / penalty, found * penalty)
        return logits
