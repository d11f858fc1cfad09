"""Contestant: TRL's pack_dataset with its default strategy, and the padding-free collator that SFTTrainer uses after it."""

import tempfile
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
    samples, setup = Samples.read()
    n_rows = setup["rows"]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def tokenised() -> Iterator[dict[str, Any]]:
        for tokens, learned in samples:
            yield {"input_ids": tokens, "labels": np.where(learned, tokens, IGNORE)}

    def batches(packs: datasets.Dataset) -> Iterator[dict[str, Any]]:
        for start in range(0, len(packs), n_rows):
            numbers = range(start, min(start + n_rows, len(packs)))
            yield collate(packs.__getitems__(list(numbers)))

    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_generator(tokenised, cache_dir=folder).save_to_disk(f"{folder}/saved")
        dataset = datasets.load_from_disk(f"{folder}/saved")
        serve(
            {
                "pack": lambda: run(lambda: pack_dataset(dataset, setup["seq_len"]), batches),
                "versions": lambda: versions("torch", "trl", "datasets"),
            }
        )


if __name__ == "__main__":
    main()
