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
    samples, setup = Samples.read()
    seq_len, n_rows = setup["seq_len"], setup["rows"]
    listed = [
        {"tokens": tokens.tolist(), "labels": np.where(learned, tokens, IGNORE).tolist()}
        for tokens, learned in samples
    ]
    names = ("tokens", "labels", "input_pos")

    def packed() -> PackedDataset:
        return PackedDataset(listed, max_seq_len=seq_len, padding_idx=0)

    def batches(packs: PackedDataset) -> Iterator[dict[str, Any]]:
        for start in range(0, len(packs), n_rows):
            rows = [packs[i] for i in range(start, min(start + n_rows, len(packs)))]
            yield {name: torch.stack([row[name] for row in rows]) for name in names}

    serve(
        {"pack": lambda: run(packed, batches), "versions": lambda: versions("torch", "torchtune")}
    )


if __name__ == "__main__":
    main()
