"""Contestant: torchtune's PackedDataset (greedy, in the order of the data); rows without the attention mask that its collator makes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from samples import IGNORE, Samples, run
from serving import serve, versions
from torchtune.datasets import PackedDataset


def main() -> None:
    """Pack when asked."""
    names = ("tokens", "labels", "input_pos")
    loaded: list[dict[str, list[int]]] = []

    def load(path: str) -> None:
        loaded[:] = [
            {"tokens": tokens.tolist(), "labels": np.where(learned, tokens, IGNORE).tolist()}
            for tokens, learned in Samples.read(path)
        ]

    def pack(seq_len: int, n_rows: int) -> dict[str, Any]:
        def batches(packs: PackedDataset) -> Iterator[dict[str, Any]]:
            for start in range(0, len(packs), n_rows):
                rows = [packs[i] for i in range(start, min(start + n_rows, len(packs)))]
                yield {name: torch.stack([row[name] for row in rows]) for name in names}

        return run(lambda: PackedDataset(loaded, max_seq_len=seq_len), batches)  # pyright: ignore

    serve({"load": load, "pack": pack, "versions": lambda: versions("torch", "torchtune")})


if __name__ == "__main__":
    main()
