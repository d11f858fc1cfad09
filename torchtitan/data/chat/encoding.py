"""All conversations of a source, encoded, by as many processes as there are cores."""

from collections.abc import Generator, Iterator
from itertools import chain

from torch.utils.data import Dataset

from torchtitan.data.chat.sample import Sample
from torchtitan.data.chat.source import Chat
from torchtitan.data.processes import in_processes, stop
from torchtitan.data.source import BadRow
from torchtitan.errors import ConfigError, DataError

_ROWS = 64
"""Of a piece of work."""
_WORTHWHILE = 1000
"""Rows for each process: fewer are encoded before it would have started."""

Encoded = Sample | BadRow
"""What a row becomes: a sample, or why it is none."""


def encode_all(source: Chat, n_workers: int) -> Generator[Encoded, None, None]:
    """What each row becomes, in the order of the data; close it if not all of it is taken.

    Args:
        source: the conversations.
        n_workers: processes that encode, at most; 0 is this one.

    Raises:
        ConfigError: if there is no template.
        DataError: if the data cannot be read, it is not known where the assistant speaks, or a process died.
    """
    pieces, n_workers = _Pieces(source), min(n_workers, len(source) // _WORTHWHILE)
    if n_workers == 0:
        made: Iterator[list[Encoded | Exception]] = map(pieces.__getitem__, range(len(pieces)))
    else:
        made = in_processes(pieces, n_workers, prefetch=4)
    try:
        for item in chain.from_iterable(made):
            if isinstance(item, Sample | BadRow):
                yield item
            else:
                raise item
    finally:
        stop(made)


class _Pieces(Dataset[list[Encoded | Exception]]):
    def __init__(self, source: Chat) -> None:
        self.source = source

    def __len__(self) -> int:
        return -(-len(self.source) // _ROWS)

    def __getitem__(self, index: int) -> list[Encoded | Exception]:
        """Errors are values, since an exception would arrive wrapped in a worker's traceback; nothing follows one."""
        made: list[Encoded | Exception] = []
        for row in range(index * _ROWS, min((index + 1) * _ROWS, len(self.source))):
            try:
                made.append(self.source.sample(row))
            except BadRow as left_out:
                made.append(left_out)
            except (DataError, ConfigError) as error:
                return [*made, error]
        return made
