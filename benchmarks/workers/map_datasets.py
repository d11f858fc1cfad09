"""Contestant: ``datasets.map`` with a tokenizer of transformers, batched, over rows of JSON lines."""

import os
import tempfile
from typing import Any

import datasets
from datasets import Dataset
from samples import timed
from serving import serve, versions
from tokens import digest
from transformers import PreTrainedTokenizerFast

_BATCH = 1000
"""Rows of a batch; the default of ``datasets``."""


def main() -> None:
    """Tokenise when asked."""
    datasets.disable_progress_bars()
    datasets.disable_caching()  # or the second round would find the result of the first
    loaded: list[Dataset] = []
    tokenizers: list[PreTrainedTokenizerFast] = []

    def load(rows: str, tokenizer: str, template: str) -> None:
        table = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=folder)
        loaded[:] = [table]
        tokenizers[:] = [PreTrainedTokenizerFast(tokenizer_file=tokenizer)]
        tokenizers[0].chat_template = template

    def text(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"ids": tokenizers[0](batch["text"], add_special_tokens=False)["input_ids"]}

    def chat(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found = tokenizers[0].apply_chat_template(
            batch["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        return {"ids": found["input_ids"], "learned": found["assistant_masks"]}

    def tokenise(kind: str, n_processes: int, threads: bool, tell: bool = False) -> dict[str, Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads else "false"
        found: dict[str, Any] = {}
        with timed(found, "all"):
            made = loaded[0].map(
                {"text": text, "chat": chat}[kind],
                batched=True,
                batch_size=_BATCH,
                num_proc=n_processes if n_processes > 1 else None,
                remove_columns=loaded[0].column_names,
            )
        if tell:
            learned = made["learned"] if kind == "chat" else [None] * len(made)
            found |= digest(zip(made["ids"], learned, strict=True))
        return found

    with tempfile.TemporaryDirectory() as folder:
        serve(
            {
                "load": load,
                "tokenise": tokenise,
                "versions": lambda: versions("datasets", "transformers", "tokenizers"),
            }
        )


if __name__ == "__main__":
    main()
