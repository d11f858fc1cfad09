"""From tokens to text as they come: never half a character, and never the beginning of a stop string."""

from collections.abc import Callable, Sequence

_CUT = "\ufffd"  # what bytes decode to that are no character, or not yet
_MOST_MISSING = 3  # bytes of a character that is not complete


class TextStream:
    """The text of one row.

    Args:
        decode: token ids to text.
        stop_strings: the text ends before the first of them.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()
    ) -> None:
        self.stopped = False
        """Whether a stop string came."""
        self._decode = decode
        self._stops = [stop for stop in stop_strings if stop]
        self._ids: list[int] = []
        self._context = self._read = 0  # ids from which to decode, and those whose text is out
        self._shown = 0  # characters that are out of the text of the others
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now."""
        self._ids.append(token_id)
        return self._release(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """No token comes any more; returns the rest."""
        return self._release(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        # Some tokenizers decode a token by those before it (a leading space): decode with the piece before, and take the difference.
        before = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        n_waiting = len(self._ids) - self._read
        if not text.startswith(before):
            # Byte by byte (SentencePiece): characters in a row are decoded once all of them are complete, or not at all.
            if not final and n_waiting <= _MOST_MISSING:
                return ""
            self._context, before = self._read, ""
            text = self._decode(self._ids[self._context :])
        text = text[len(before) :]
        cut = len(text) - len(text.rstrip(_CUT))
        if cut > _MOST_MISSING and n_waiting > _MOST_MISSING and not final:
            return self._oldest_text()
        sure = text if final else text[: len(text) - cut]
        new, self._shown = sure[self._shown :], len(sure)
        if len(sure) == len(text):
            self._context, self._read, self._shown = self._read, len(self._ids), 0
        return new

    def _oldest_text(self) -> str:
        """The text of the oldest tokens that wait, where more wait than a character can have.

        They are parted from the others where that leaves the fewest marks of bytes that are no character: a U+FFFD that
        was said is one mark, and the bytes of a cut character may be one each.
        """
        waiting = self._ids[self._read :]
        parts = [
            (self._decode(waiting[:n]), self._decode(waiting[n:])) for n in range(1, len(waiting))
        ]
        n_oldest = 1 + min(range(len(parts)), key=lambda i: len(parts[i][0]) + len(parts[i][1]))
        new = parts[n_oldest - 1][0][self._shown :]
        self._context, self._read, self._shown = self._read, self._read + n_oldest, 0
        return new

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
