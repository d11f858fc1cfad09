"""``torchtitan chat``: talk to a model."""

from collections.abc import Sequence

from torchtitan.cli.arguments import Arguments
from torchtitan.cli.output import say, trickle
from torchtitan.cli.sampling_arguments import add_arguments, open_generator, sampling_of
from torchtitan.data.chat.template import Message

_LEAVE, _FORGET = "/exit", "/new"


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan chat ...`` and return its exit code."""
    parser = Arguments(
        "chat",
        f"Talk to a model. {_FORGET} begins a new conversation; {_LEAVE}, Ctrl-D or Ctrl-C ends the program.",
    )
    add_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    arguments = parser.parse(argv)
    if arguments is None:
        return 0
    generator, source = open_generator(arguments)
    sampling = sampling_of(arguments, source)
    start: list[Message] = []
    if arguments.system:
        start = [{"role": "system", "content": arguments.system}]
    source.encode_chat([*start, {"role": "user", "content": "?"}])  # what cannot be is said now
    messages = list(start)
    while (text := _ask()) is not None:
        if text == _FORGET:
            messages = list(start)
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        for piece in generator.stream(
            [source.encode_chat(messages)],
            sampling,
            max_new_tokens=arguments.max_new_tokens,
            stop_ids=source.stop_ids,
            stop_strings=arguments.stop,
        ):
            trickle(piece.text)
            answer += piece.text
        say("")
        messages.append({"role": "assistant", "content": answer})
        sampling.seed += 1  # another answer to the same question
    return 0


def _ask() -> str | None:
    """The next question; None at the end."""
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            say("")
            return None
        if text == _LEAVE:
            return None
        if text:
            return text
