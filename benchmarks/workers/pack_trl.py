"""Contestant: TRL's pack_dataset with its default strategy, and the padding-free collator that SFTTrainer uses after it."""

import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
from samples import IGNORE, Samples, run
from serving import serve, versions
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def main() -> None:
    """Pack when asked."""
    datasets.disable_progress_bars()
    datasets.disable_caching()  # or the second round would find the packs of the first
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    loaded: list[datasets.Dataset] = []

    def load(path: str) -> None:
        def tokenised() -> Iterator[dict[str, Any]]:
            for tokens, learned in Samples.read(path):
                yield {"input_ids": tokens, "labels": np.where(learned, tokens, IGNORE)}

        home = f"{folder}/{uuid.uuid4().hex}"
        datasets.Dataset.from_generator(tokenised, cache_dir=home).save_to_disk(f"{home}/saved")
        loaded[:] = [datasets.load_from_disk(f"{home}/saved")]

    def pack(seq_len: int, n_rows: int) -> dict[str, Any]:
        def batches(packs: datasets.Dataset) -> Iterator[dict[str, Any]]:
            for start in range(0, len(packs), n_rows):
                numbers = range(start, min(start + n_rows, len(packs)))
                yield collate(packs.__getitems__(list(numbers)))

        return run(lambda: pack_dataset(loaded[0], seq_len), batches)

    with tempfile.TemporaryDirectory() as folder:
        serve(
            {"load": load, "pack": pack, "versions": lambda: versions("torch", "trl", "datasets")}
        )


if __name__ == "__main__":
    main()
