"""Train the tokenizer that is shipped as ``torchtitan/data/assets/tokenizer.json``.

A byte-level BPE in the manner of Llama 3 (its split pattern), trained on the embedded training
text. The result depends on the text of the Python that runs this, so the shipped file was made with
CPython 3.11; the same Python makes the same file::

    python scripts/train_tokenizer.py --out torchtitan/data/assets/tokenizer.json
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan.data.embedded import Embedded
from torchtitan.data.source import BadRow

SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|reserved_{i}|>" for i in range(11)),
]
"""Ids 0 to 15. Beginning and end of a document, padding, chat turns, and room for what comes later."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with ``vocab_size`` entries, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def embedded_texts() -> Iterator[str]:
    """The readable documents of the embedded training split."""
    source = Embedded.Config(split="train").build()
    for index in range(len(source)):
        try:
            yield source.read(index)
        except BadRow:
            continue


def main() -> None:
    """Train and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="entries, special tokens included"
    )
    arguments = parser.parse_args()
    tokenizer = train(embedded_texts(), arguments.vocab_size)
    arguments.out.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    sys.stdout.write(f"{arguments.out}: {tokenizer.get_vocab_size()} entries\n")


if __name__ == "__main__":
    main()
