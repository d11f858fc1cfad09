"""Is there enough text for one global batch? Decided before the first step, and the same on every rank.

Letters: G rows in a global batch, S tokens in a row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torchtitan.data.bad_rows import DOCUMENTS, EMPTY, BadRowPolicy, bad_kinds, bad_total
from torchtitan.data.document import Document
from torchtitan.data.feed import Part
from torchtitan.data.order import permuted
from torchtitan.data.source import BadRow, MapSource, SequentialSource
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError

_SAMPLE_ROWS = 1000
_SAMPLE_MARGIN = 10


def check_enough(
    sources: Sequence[MapSource | SequentialSource],
    *,
    tokenizer: Tokenizer,
    global_batch_rows: int,
    seq_len: int,
    policy: BadRowPolicy,
    one_per_row: bool = False,
) -> None:
    """Raise unless one epoch of the sources fills a global batch and each source has some text.

    Every rank looks at the same documents, whichever streams it owns, so that all of them raise or
    none does. The work is bounded by the tokens of one global batch, or by a sample of 1000 rows
    where that promises ten times as many. With ``one_per_row`` a document takes a row whatever its
    length.

    Raises:
        DataError: with counts and remedies; also for a source without any text, and for too many
        bad rows.
    """
    needed = global_batch_rows * seq_len
    counts: Counter[str] = Counter()
    tokens = 0
    for source in sources:
        seen: Counter[str] = Counter()
        source_tokens = 0
        for text in _texts(source, policy, seen):
            source_tokens += seq_len if one_per_row else _n_tokens(text, tokenizer, needed)
            if tokens + source_tokens >= needed or _promises(source, seen, source_tokens, needed):
                source_tokens = max(source_tokens, needed)
                break
        if source_tokens == 0:
            raise DataError(
                f"{source.describe()}: there is no text in it ({_told(seen)}); {_REMEDY_EMPTY}"
            )
        tokens += source_tokens
        counts += seen
    if tokens < needed:
        raise DataError(
            f"too little data: {'; '.join(source.describe() for source in sources)} ({_told(counts)}) give {tokens} "
            f"tokens, which pack into {tokens // seq_len} rows of seq_len={seq_len}, but one global batch needs "
            f"global_batch_rows={global_batch_rows} rows ({needed} tokens); "
            "set fewer global_batch_rows or a shorter seq_len, or add data"
        )


_REMEDY_EMPTY = "point the source at data with text (check the path, split and text_field), or remove the source"


def _n_tokens(text: Any, tokenizer: Tokenizer, needed: int) -> int:
    if isinstance(text, str):
        return len(Document(Part(text), tokenizer).take(needed)[0])
    return text.n_tokens


def _texts(
    source: MapSource | SequentialSource, policy: BadRowPolicy, counts: Counter[str]
) -> Iterator[Any]:
    """The texts of one epoch; every row is counted. Rows of a map-style source come in a fixed random order."""
    for read in _reads(source):
        try:
            text = read()
        except BadRow as row:
            policy.meet(row, counts)
            policy.judge(counts)
            continue
        if not isinstance(text, str) or text.strip():
            counts[DOCUMENTS] += 1
            yield text
        else:
            counts[EMPTY] += 1


def _reads(source: MapSource | SequentialSource) -> Iterator[Callable[[], Any]]:
    if isinstance(source, MapSource):
        for index in range(len(source)):
            yield partial(source.read, permuted(index, len(source), key=0))
    else:
        for number, value in enumerate(source.rows(start=0, shuffle_seed=None)):
            yield partial(source.document, value, source.place(number))


def _promises(
    source: MapSource | SequentialSource, seen: Counter[str], tokens: int, needed: int
) -> bool:
    """Whether the rows seen so far are enough to tell that the source has plenty."""
    rows = seen.total()
    return (
        isinstance(source, MapSource)
        and rows >= _SAMPLE_ROWS
        and tokens * len(source) >= _SAMPLE_MARGIN * needed * rows
    )


def _told(counts: Counter[str]) -> str:
    rows = f"{counts.total()} rows read: {counts[DOCUMENTS]} documents, {counts[EMPTY]} empty"
    if any(kind.startswith("dropped_") for kind in counts):
        rows += f", dropped: {bad_kinds(counts, 'dropped_')}"
    return f"{rows}, {bad_total(counts)} bad ({bad_kinds(counts)})"
