"""``torchtitan generate``: continue texts."""

import sys
from collections.abc import Sequence

from torchtitan.cli.arguments import Arguments
from torchtitan.cli.output import complain, say, trickle
from torchtitan.cli.sampling_arguments import add_arguments, open_generator, sampling_of
from torchtitan.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan generate ...`` and return its exit code."""
    parser = Arguments(
        "generate",
        "Continue one text or several at once. One is shown as it is written; of several each comes whole, under its number.",
    )
    add_arguments(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated (default: what comes on stdin)")  # fmt: skip
    parser.add_argument("--chat", action="store_true", help="the prompt is a question, in the chat template")  # fmt: skip
    arguments = parser.parse(argv)
    if arguments is None:
        return 0
    generator, source = open_generator(arguments)
    sampling = sampling_of(arguments, source)
    texts = arguments.prompt or [_read()]
    prompts = [
        source.encode_chat([{"role": "user", "content": text}])
        if arguments.chat
        else source.encode(text)
        for text in texts
    ]
    if [] in prompts:
        where = f"--prompt number {prompts.index([]) + 1}" if arguments.prompt else "what came on stdin"  # fmt: skip
        raise ConfigError(f"{where} is empty, and the tokenizer puts no token before text; write some text")  # fmt: skip
    pieces = generator.stream(
        prompts,
        sampling,
        max_new_tokens=arguments.max_new_tokens,
        stop_ids=source.stop_ids,
        stop_strings=arguments.stop,
    )
    if len(prompts) == 1:
        for piece in pieces:
            trickle(piece.text)
        say("")
        return 0
    whole = [""] * len(prompts)
    for piece in pieces:
        whole[piece.row] += piece.text
    for number, text in enumerate(whole, start=1):
        say(f"[{number}] {text}")
    return 0


def _read() -> str:
    """The prompt on stdin."""
    if sys.stdin.isatty():
        complain("Write the prompt, then press Ctrl-D.")
    return sys.stdin.read()
