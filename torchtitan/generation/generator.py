"""Generation: batches of prompts of any lengths, continued token by token."""

# Shapes: B batch rows, S new tokens, D dim, V vocabulary.

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from torchtitan.generation.kv_cache import KVCache, cached
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.text import TextStream
from torchtitan.models.decoder import Decoder
from torchtitan.parallel.compile import uncompiled

Ending = Literal["stop", "length"]


class Decodes(Protocol):
    """What of a tokenizer is needed."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        ...


class Agrees(Protocol):
    """Makes ranks that compute the same tokens go on with the same ones, should rounding ever part them."""

    def __call__(self, token_ids: list[int]) -> list[int]:
        """The tokens of one of the ranks, on all of them; each rank passes its own."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step adds to a row.

    Attributes:
        row: number of the prompt.
        token_id: the new token; a stop token is one too.
        text: what is certain of the text now; empty while a character or a stop string may not be complete.
        ending: why the row ends with this piece; None if it goes on.
    """

    row: int
    token_id: int
    text: str
    ending: Ending | None


@dataclass(slots=True)
class Completion:
    """A continued prompt.

    Attributes:
        ids: the new tokens, with the stop token if one came.
        text: without the stop token, and without a stop string and what follows it.
        ending: ``stop`` for a stop token or string, ``length`` if the limit was reached.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    ending: Ending = "length"


@dataclass(slots=True)
class _Row:
    index: int
    history: list[int]
    text: TextStream
    generator: torch.Generator
    n_new: int = 0


class Generator:
    """Continues prompts with a model.

    The model may be cut by FSDP, over tensor-parallel, context-parallel or expert-parallel ranks; then all ranks call it alike,
    with the same prompts, and all get the same tokens. Its attention backends are replaced while it runs only, and its blocks
    are not compiled then, so a model in training can be sampled from.

    Args:
        model: with weights.
        tokenizer: its vocabulary.
        token_multiple: pad the tokens of each forward to a multiple of this: the ranks over which sequence parallelism divides
            them.
        agree: for several ranks.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Decodes,
        *,
        token_multiple: int = 1,
        agree: Agrees | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._multiple, self._agree = token_multiple, agree

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling.Config,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> list[Completion]:
        """Continue each of ``prompts``; see `stream`."""
        found = [Completion() for _ in prompts]
        for piece in self.stream(
            prompts,
            sampling,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
        ):
            row = found[piece.row]
            row.ids.append(piece.token_id)
            row.text += piece.text
            row.ending = piece.ending or row.ending
        return found

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling.Config,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Continue prompts, all a token further at a time. A row that has ended leaves the batch.

        Args:
            prompts: token ids, at least one each.
            sampling: how tokens are chosen.
            max_new_tokens: limit of each row.
            stop_ids: tokens that end a row.
            stop_strings: texts that end a row.

        Raises:
            ValueError: if a prompt is empty, or there is nothing to generate.
        """
        empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
        if empty or max_new_tokens < 1:
            raise ValueError(
                f"prompts {empty} have no token and max_new_tokens={max_new_tokens}; "
                "pass at least one token each, and at least 1"
            )
        sampler = sampling.build()
        rows = [
            _Row(i, list(prompt), TextStream(self.tokenizer.decode, stop_strings), generator)
            for i, (prompt, generator) in enumerate(
                zip(prompts, sampler.generators(len(prompts)), strict=True)
            )
        ]
        new = [list(prompt) for prompt in prompts]
        capacity = max(map(len, prompts), default=0) + max_new_tokens + self._multiple
        cache = KVCache(len(rows), capacity, self.model.head.weight.device)
        was_training = self.model.training
        frozen = not any(parameter.requires_grad for parameter in self.model.parameters())
        # Inference mode is faster, but what FSDP gathers in it could not be trained with.
        without_gradients = torch.inference_mode if frozen else torch.no_grad
        self.model.eval()
        try:
            with cached(self.model, cache):
                while rows:
                    with without_gradients():
                        logits = self._next_logits(new, cache)
                        chosen = sampler(
                            logits, [row.history for row in rows], [row.generator for row in rows]
                        )
                    if self._agree is not None:
                        chosen = self._agree(chosen)
                    going = []
                    for place, (row, token_id) in enumerate(zip(rows, chosen, strict=True)):
                        piece = _extend(row, token_id, max_new_tokens, stop_ids)
                        yield piece
                        if piece.ending is None:
                            going.append(place)
                    if going and len(going) < len(rows):
                        cache.keep(going)
                    rows = [rows[place] for place in going]
                    new = [row.history[-1:] for row in rows]
        finally:
            self.model.train(was_training)

    def _next_logits(self, new: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
        """``(B, V)`` float32, after the last of each row's new tokens."""
        counts = [len(ids) for ids in new]
        width = -(-max(counts) // self._multiple) * self._multiple
        cache.begin(width)
        padded = [[*ids, *[0] * (width - len(ids))] for ids in new]
        tokens = torch.tensor(padded, device=cache.device)  # (B, S)
        with uncompiled(self.model):
            hidden_states = self.model(tokens, cache.positions)  # (B, S, D)
        last = [row * width + count - 1 for row, count in enumerate(counts)]
        cache.end(counts)
        return self.model.head.logits(hidden_states, torch.tensor(last, device=cache.device))


def _extend(row: _Row, token_id: int, max_new_tokens: int, stop_ids: Collection[int]) -> Piece:
    """Add a token to a row."""
    row.history.append(token_id)
    row.n_new += 1
    ending: Ending | None = None
    text = ""
    if token_id in stop_ids:
        ending = "stop"
    else:
        text = row.text.push(token_id)
        if row.text.stopped:
            ending = "stop"
        elif row.n_new == max_new_tokens:
            ending = "length"
    if ending is not None:
        text += row.text.finish()
        if row.text.stopped:
            ending = "stop"
    return Piece(row.index, token_id, text, ending)
