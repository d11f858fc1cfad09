"""Contestant: this library. Text goes through the whole loader to batches; conversations are encoded, packed and written to disk."""

import tempfile
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
from samples import timed
from serving import serve, versions
from tokens import digest

from torchtitan.data.bad_rows import BadRowPolicy
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.prepared import Prepared, prepare
from torchtitan.data.chat.source import Chat
from torchtitan.data.files import Files
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer

_SEQ_LEN = 4096


class Tokenising:
    """One set of rows, and what is made of it."""

    def load(self, rows: str, tokenizer: str, template: str) -> None:
        """Take rows and a tokenizer."""
        self.files = Files.Config(path=rows)
        self.tokenizer = Tokenizer.Config(path=tokenizer, chat_template=template).build()
        self.n_tokens = 0

    def tokenise(
        self, kind: str, n_processes: int, threads: bool, tell: bool = False
    ) -> dict[str, Any]:
        """Tokenise once; one process is this one. Ours has no use for threads."""
        del threads
        return {"text": self.text, "chat": self.chat}[kind](n_processes, tell)

    def text(self, n_processes: int, tell: bool) -> dict[str, Any]:
        """Make batches of one row for each process, of as many tokens as all rows have, up to one batch."""
        loader = Loader.Config(
            sources=[self.files], shuffle=False, n_workers=n_processes if n_processes > 1 else 0
        ).build(
            tokenizer=self.tokenizer,
            seq_len=_SEQ_LEN,
            global_batch_rows=n_processes,
            dp_rank=0,
            dp_world_size=1,
            seed=0,
        )
        if tell:
            rows = list(islice(self._documents(loader), loader.plan.rows_per_epoch[0]))
            self.n_tokens = sum(map(len, rows))
            return digest((ids, None) for ids in rows)
        found: dict[str, Any] = {}
        n_steps = max(1, self.n_tokens // (_SEQ_LEN * n_processes))
        with timed(found, "all"):
            for _ in range(n_steps):
                loader.next()
            loader.close()
        return {**found, "tokens": n_steps * _SEQ_LEN * n_processes}

    def _documents(self, loader: Loader) -> Iterator[list[int]]:
        """The ids of each row without those around it, from a loader of one stream."""
        document = []
        while True:
            for token in loader.next().batch["tokens"].flatten().tolist():
                if token == self.tokenizer.eos_id:
                    yield document
                    document = []
                elif token != self.tokenizer.bos_id:
                    document.append(token)

    def chat(self, n_processes: int, tell: bool) -> dict[str, Any]:
        """Prepare all conversations."""
        encoder = ChatLoader.Config(sources=[]).encoder(self.tokenizer, _SEQ_LEN)
        source = Chat.Config(rows=self.files).open(encoder)
        if not isinstance(source, Chat):
            raise TypeError("files are read by index")
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as home:
            with timed(found, "all"):
                made = prepare(
                    source,
                    seq_len=_SEQ_LEN,
                    shared=True,
                    policy=BadRowPolicy("error", 0.0),
                    cache_folder=home,
                    n_workers=n_processes if n_processes > 1 else 0,
                )
            told = digest(_samples(made)) if tell else {}
        return {**found, "tokens": made.report["tokens"], **told}


def _samples(made: Prepared) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    names = ("tokens", "learned", "starts")
    tokens, learned, starts = (np.load(made.folder / f"{name}.npy") for name in names)
    for start, end in pairwise(starts):
        yield tokens[start:end], learned[start:end]


def main() -> None:
    """Tokenise when asked."""
    ours = Tokenising()
    serve(
        {
            "load": ours.load,
            "tokenise": ours.tokenise,
            "versions": lambda: versions("torchtitan", "tokenizers"),
        }
    )


if __name__ == "__main__":
    main()
