"""A sample as a person reads it, the tokens that are learned in colour."""

from dataclasses import dataclass

from torchtitan.data.chat.sample import Sample
from torchtitan.data.tokenizer import Tokenizer

_COLOUR, _PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands before and after text that is learned."""

    before: str
    after: str


COLOURED = Marks(_COLOUR, _PLAIN)
BRACKETED = Marks("⟦", "⟧")
"""For output that is no terminal."""


def shown(sample: Sample, tokenizer: Tokenizer, marks: Marks) -> str:
    """The text of a sample; what is learned is between ``marks``, line by line.

    Runs of learned and other tokens are decoded each as a whole, so that no character is cut
    unless the run itself ends inside one.
    """
    parts, start = [], 0
    learned = sample.learned.copy()
    learned[:1] = False  # nothing comes before the first token from which it could be learned
    for end in range(1, len(sample) + 1):
        if end < len(sample) and learned[end] == learned[start]:
            continue
        text = tokenizer.decode(sample.tokens[start:end].tolist())
        parts.append(_marked(text, marks) if learned[start] else text)
        start = end
    return "".join(parts)


def _marked(text: str, marks: Marks) -> str:
    """Marks close at each line's end: pagers and terminals colour line by line."""
    lines = text.split("\n")
    return "\n".join(marks.before + line + marks.after if line else line for line in lines)
