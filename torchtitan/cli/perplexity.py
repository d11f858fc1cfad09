"""``torchtitan perplexity``: how well a model predicts the texts of files."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice

from torchtitan.cli.arguments import Arguments
from torchtitan.cli.model_arguments import add_arguments, open_model
from torchtitan.cli.options import refuse
from torchtitan.cli.output import complain, say
from torchtitan.config.configurable import Problem
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat, Reader
from torchtitan.data.files import Files
from torchtitan.data.source import documents
from torchtitan.evaluation.perplexity import Perplexity, measure
from torchtitan.evaluation.scorer import Scorer

DEFAULT_SEQ_LEN = 2048
_TELL_EVERY_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan perplexity ...`` and return its exit code."""
    parser = Arguments(
        "perplexity",
        "Loss, perplexity and bits per byte of texts and conversations, each by itself. What counts is what training would "
        "learn: of a text all tokens and its end, of a conversation the assistant's turns.",
    )
    add_arguments(parser)
    parser.add_argument("data", nargs="+", help="files, folders or globs: .jsonl .json .csv .parquet .txt, also .gz .zst")  # fmt: skip
    parser.add_argument("--seq-len", type=int, help=f"tokens that the model gets at once (its context, at most {DEFAULT_SEQ_LEN})")  # fmt: skip
    parser.add_argument("--stride", type=int, help="tokens by which it goes on in a longer document (seq-len / 2)")  # fmt: skip
    parser.add_argument("--batch-rows", type=int, default=8, help="windows at a time (8)")
    parser.add_argument("--limit", type=int, help="rows to read (default: all)")
    parser.add_argument("--format", default="auto", choices=("auto", "messages", "sharegpt", "prompt_completion", "instruction", "text"), help="of the rows (auto)")  # fmt: skip
    parser.add_argument("--column", action="append", default=[], metavar="NAME=COLUMN", help="a column that has another name in the data: text=content")  # fmt: skip
    parser.add_argument("--learn", default="assistant", choices=("assistant", "last", "all"), help="what counts in a conversation (assistant)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="write the numbers as JSON")
    arguments = parser.parse(argv)
    if arguments is None:
        return 0
    files = Files.Config(path=arguments.data)
    chat = Chat.Config(
        rows=files,
        format=arguments.format,
        columns=dict(column.partition("=")[::2] for column in arguments.column),
    )
    refuse([*_problems(arguments), *chat.check()])
    rows = files.build_rows()  # before the model: what is missing is told at once
    source = open_model(arguments)
    context = source.model.config.context_length or DEFAULT_SEQ_LEN
    seq_len = arguments.seq_len or min(context, DEFAULT_SEQ_LEN)
    stride = arguments.stride or max(1, seq_len // 2)
    if stride > seq_len:
        reason = f"is more than the {seq_len} tokens of a window, so some would not be predicted"
        refuse([Problem("--stride", stride, reason, f"write {seq_len} or less")])
    loader = ChatLoader.Config(sources=[chat], learn=arguments.learn)
    reader = Reader(loader.encoder(source.tokenizer, sys.maxsize), chat.format, chat.columns)
    found = measure(
        Scorer(source.model, batch_rows=arguments.batch_rows),
        source.tokenizer,
        islice(documents(Chat(rows, reader)), arguments.limit),
        seq_len=seq_len,
        stride=stride,
        progress=_Told(),
    )
    say(json.dumps(found.numbers(), indent=2) if arguments.json else found.describe())
    return 0


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    found = []
    for name in ("seq_len", "stride", "batch_rows", "limit"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            found.append(Problem(option, value, "is not positive", "write 1 or more"))
    return found


class _Told:
    """Tells how far it is, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _TELL_EVERY_S

    def __call__(self, so_far: Perplexity) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TELL_EVERY_S
        complain(
            f"{so_far.documents} documents begun, {so_far.scored} tokens predicted, perplexity {so_far.perplexity:.4f}"
        )
