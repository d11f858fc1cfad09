"""Sources made of a list of texts, and a run of loaders over several data ranks."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.data import Loader, LoaderStep, MapSource, SequentialSource, Source, Tokenizer
from torchtitan.data.order import permuted

TOKENIZER = Tokenizer.Config().build()


class Texts(MapSource):
    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        texts: list[str] = field(default_factory=list)

        def build(self) -> "Texts":
            return Texts(self)

    def __init__(self, config: Config) -> None:
        self.texts = config.texts

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, index: int) -> str:
        return self.texts[index]

    def describe(self) -> str:
        return f"Texts: {len(self)} rows"


class StreamedTexts(SequentialSource):
    """The same, in order only; `reads` counts the rows handed out by this process."""

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        texts: list[str] = field(default_factory=list)

        def build(self) -> "StreamedTexts":
            return StreamedTexts(self)

    def __init__(self, config: Config) -> None:
        self.texts = config.texts
        self.reads = 0

    def rows(self, *, start: int, shuffle_seed: int | None) -> Iterator[object]:
        n = len(self.texts)
        for i in range(start, n):
            self.reads += 1
            yield self.texts[i if shuffle_seed is None else permuted(i, n, shuffle_seed)]

    def place(self, row: int) -> str:
        return f"row {row + 1}"

    def describe(self) -> str:
        return "StreamedTexts"


def build(
    config: Loader.Config,
    *,
    rows: int = 8,
    seq_len: int = 32,
    rank: int = 0,
    ranks: int = 1,
    seed: int = 0,
) -> Loader:
    return config.build(
        tokenizer=TOKENIZER,
        seq_len=seq_len,
        global_batch_rows=rows,
        dp_rank=rank,
        dp_world_size=ranks,
        seed=seed,
    )


class Ranks:
    """The loaders of all data ranks, in one process."""

    def __init__(
        self, config: Loader.Config, ranks: int = 1, state: dict | None = None, **shape
    ) -> None:
        self.loaders = [build(config, rank=rank, ranks=ranks, **shape) for rank in range(ranks)]
        if state is not None:
            for loader in self.loaders:
                loader.load_state(json.loads(json.dumps(state)))
        self.state = state
        self.steps: list[LoaderStep] = []

    def next(self) -> Tensor:
        """The global batch, ``(G, 4, S)``."""
        self.steps = [loader.next() for loader in self.loaders]
        self.state = Loader.merge_states([step.state for step in self.steps])
        return torch.cat([torch.stack(list(step.batch.values()), dim=1) for step in self.steps])

    def take(self, n_steps: int) -> list[Tensor]:
        return [self.next() for _ in range(n_steps)]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def documents(rows: list[Tensor], stream: int) -> list[str]:
    """The texts that a stream has packed into whole documents, in order; the last may be cut."""
    ids = torch.cat([batch[stream, 0] for batch in rows]).tolist()
    texts, current = [], []
    for token in ids:
        if token == TOKENIZER.bos_id:
            current = []
        elif token == TOKENIZER.eos_id:
            texts.append(TOKENIZER.decode(current))
        else:
            current.append(token)
    return texts


def run_on(loader: Loader, n_steps: int = 300) -> None:
    """Draw batches, for what goes wrong on the way."""
    for _ in range(n_steps):
        loader.next()
