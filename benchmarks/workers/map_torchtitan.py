"""Contestant: this library. Text goes through the whole loader to batches; conversations are encoded, packed and written to disk."""

import itertools
import tempfile
from collections.abc import Iterator
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


def main() -> None:
    """Tokenise when asked."""
    loaded: dict[str, Any] = {}

    def load(rows: str, tokenizer: str, template: str) -> None:
        config = Tokenizer.Config(path=tokenizer, chat_template=template)
        loaded.update(files=Files.Config(path=rows), tokenizer=config.build())

    def streams(n_processes: int) -> Loader:
        """One stream for each process; without a background process there is one, which has the rows in their order."""
        return Loader.Config(
            sources=[loaded["files"]],
            shuffle=False,
            n_workers=n_processes if n_processes > 1 else 0,
        ).build(
            tokenizer=loaded["tokenizer"],
            seq_len=_SEQ_LEN,
            global_batch_rows=n_processes,
            dp_rank=0,
            dp_world_size=1,
            seed=0,
        )

    def text(n_processes: int, tell: bool) -> dict[str, Any]:
        loader = streams(n_processes)
        found: dict[str, Any] = {}
        if tell:
            n_rows = loader.plan.rows_per_epoch[0]
            assert n_rows is not None  # noqa: S101 - files are read by index
            rows = list(itertools.islice(documents(loader), n_rows))
            loaded["tokens"] = sum(map(len, rows))
            found |= digest((ids, None) for ids in rows)
        else:
            # Whole batches, of as many tokens as all rows have, up to one batch.
            n_steps = loaded["tokens"] // (_SEQ_LEN * n_processes)
            with timed(found, "all"):
                for _ in range(n_steps):
                    loader.next()
                loader.close()
            found["tokens"] = n_steps * _SEQ_LEN * n_processes
        loader.close()
        return found

    def documents(loader: Loader) -> Iterator[list[int]]:
        """The ids of each row without those around it, from a loader of one stream."""
        tokenizer, document = loaded["tokenizer"], []
        while True:
            for token in loader.next().batch["tokens"].flatten().tolist():
                if token == tokenizer.eos_id:
                    yield document
                    document = []
                elif token != tokenizer.bos_id:
                    document.append(token)

    def chat(n_processes: int, tell: bool) -> dict[str, Any]:
        encoder = ChatLoader.Config(sources=[]).encoder(loaded["tokenizer"], _SEQ_LEN)
        source = Chat.Config(rows=loaded["files"]).open(encoder)
        assert isinstance(source, Chat)  # noqa: S101 - files are read by index
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
            found["tokens"] = made.report["tokens"]
            if tell:
                found |= digest(samples(made))
        return found

    def samples(made: Prepared) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        tokens, learned, starts = (
            np.load(made.folder / f"{name}.npy") for name in ("tokens", "learned", "starts")
        )
        for start, end in itertools.pairwise(starts):
            yield tokens[start:end], learned[start:end]

    def tokenise(kind: str, n_processes: int, threads: bool, tell: bool = False) -> dict[str, Any]:
        del threads
        return {"text": text, "chat": chat}[kind](n_processes, tell)

    serve(
        {
            "load": load,
            "tokenise": tokenise,
            "versions": lambda: versions("torchtitan", "tokenizers"),
        }
    )


if __name__ == "__main__":
    main()
