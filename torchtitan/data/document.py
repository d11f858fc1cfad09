"""The tokens of one document, encoded slice by slice as they are needed.

A book of 100 MB takes minutes to encode; its first row should not wait for the last, nor a resumed
run for what was read before. Ordinary documents are one slice.
"""

from collections.abc import Sequence

import numpy as np

from torchtitan.batch import IGNORE_INDEX
from torchtitan.data.feed import Part
from torchtitan.data.tokenizer import Tokenizer

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


OPENING_TOKENS = 32


def opening(ids: Sequence[int]) -> list[int]:
    """The first tokens of a document, for a model to go on with: at most `OPENING_TOKENS`, and not more than half of it."""
    return list(ids[: max(1, min(OPENING_TOKENS, len(ids) // 2))])


class Document:
    """Gives out the tokens of a document with their labels.

    Args:
        part: the text; its beginning and end get the tokenizer's special tokens.
        tokenizer: encodes it.
        place: where to begin, as `place` told it: the number of a slice and an offset in its
            tokens.
    """

    def __init__(self, part: Part, tokenizer: Tokenizer, place: tuple[int, int] = (0, 0)) -> None:
        self._part = part
        self._tokenizer = tokenizer
        self._cuts = tokenizer.cuts(part.text)
        self._first_slice, self._offset = place
        self._slices: list[Ids] = [self._encode(self._first_slice)]

    @property
    def place(self) -> tuple[int, int]:
        """Where the next token is."""
        return self._first_slice, self._offset

    @property
    def finished(self) -> bool:
        """Whether there is no token left."""
        return self._all_encoded() and self._offset == sum(map(len, self._slices))

    def take(self, n_tokens: int) -> tuple[Ids, Ids]:
        """The next tokens, at most ``n_tokens``, and their labels.

        A label is the token that follows, and `IGNORE_INDEX` where the document (or its part) ends.
        """
        while sum(map(len, self._slices)) <= self._offset + n_tokens and not self._all_encoded():
            self._slices.append(self._encode(self._first_slice + len(self._slices)))
        start, end = self._offset, self._offset + n_tokens
        known = np.concatenate(self._slices) if len(self._slices) > 1 else self._slices[0]
        tokens, following = known[start:end], known[start + 1 : end + 1]
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[: len(following)] = following
        self._offset += len(tokens)
        while len(self._slices) > 1 and self._offset >= len(self._slices[0]):
            self._offset -= len(self._slices.pop(0))
            self._first_slice += 1
        return tokens, labels

    def _all_encoded(self) -> bool:
        return self._first_slice + len(self._slices) == len(self._cuts) - 1

    def _encode(self, number: int) -> Ids:
        bos_id, eos_id = self._tokenizer.bos_id, self._tokenizer.eos_id
        first, last = number == 0, number == len(self._cuts) - 2
        before = [bos_id] if first and self._part.first and bos_id is not None else []
        after = [eos_id] if last and self._part.last else []
        ids = self._tokenizer.encode(self._part.text[self._cuts[number] : self._cuts[number + 1]])
        return np.array([*before, *ids, *after], dtype=np.int32)
