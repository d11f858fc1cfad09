"""What a source of documents is, and what a row that holds no usable text is."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import DataError


class BadRow(Exception):  # noqa: N818 - a finding that the policy of the loader turns into a count or an error
    """A row without usable text.

    Args:
        kind: what is wrong, one of a few words that are counted (``broken``, ``missing_field``,
            ``null``, ``not_text``, ``invalid_utf8``).
        place: file and row, such as ``data/a.jsonl line 17``.
        reason: the same for a reader, with what was found.
    """

    fault = True
    """Whether the data is to blame; a row without fault is counted as dropped and never an error."""

    def __init__(self, kind: str, place: str, reason: str) -> None:
        super().__init__(kind, place, reason)
        self.kind = kind
        self.place = place
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class Source(Configurable):
    """Where documents come from; a subclass of `MapSource` or `SequentialSource`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings that all sources share."""

        weight: float = 1.0
        """Share of the tokens, relative to the weights of the other sources; greater than 0."""

        def check(self) -> Iterator[Problem]:
            """A weight of zero would be a source that is listed and never read."""
            if not self.weight > 0:
                yield Problem(
                    "weight",
                    self.weight,
                    "is not greater than 0",
                    "set a positive weight or remove the source",
                )

        def build(self) -> "MapSource | SequentialSource":
            """Open the source; each kind of source has its own."""
            raise NotImplementedError(f"{type(self).__qualname__} does not define build()")

        def build_rows(self) -> "MapSource | SequentialSource":
            """Open the source for whole rows, as conversations need them, instead of the text of one field.

            Raises:
                DataError: if the rows of this kind of source are nothing but text.
            """
            raise DataError(
                f"{type(self).__qualname__} has text only, no rows with several fields; use Files, HuggingFace or Docstrings"
            )

    divisible: ClassVar[bool] = True
    """Whether a document may be cut into parts that are packed apart."""

    @abstractmethod
    def describe(self) -> str:
        """Name and size for messages, such as ``Files(data): 3 files, 1200 rows``."""

    def fingerprint(self) -> str:
        """Equal as long as the data is the same; what is prepared from it is found again by this."""
        return self.describe()


class MapSource(Source):
    """A source whose documents can be read in any order."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows, good and bad."""

    @abstractmethod
    def read(self, index: int) -> Any:
        """Text of row ``index``, or the whole row where the source was opened for rows.

        Raises:
            BadRow: if the row has no usable text.
        """

    def place(self, index: int) -> str:
        """Where row ``index`` is, for messages."""
        return f"{self.describe()}, row {index + 1}"


class SequentialSource(Source):
    """A source that can only be read in order, such as a data set streamed over the network."""

    @abstractmethod
    def rows(self, *, start: int, shuffle_seed: int | None) -> Iterator[object]:
        """The values of the text field of one epoch, from row ``start`` on; ``text_of`` judges them.

        Args:
            start: rows of the epoch to leave out.
            shuffle_seed: decides the epoch's order; None keeps the order of the data.
        """

    @abstractmethod
    def place(self, row: int) -> str:
        """Where the row with this number (from 0, in the order read) is, for messages."""

    def document(self, value: object, place: str) -> Any:
        """What a value that `rows` gave is: its text.

        Raises:
            BadRow: if the row has no usable text.
        """
        return text_of(value, place)


def documents(source: MapSource | SequentialSource) -> Iterator[tuple[str, Any]]:
    """All documents in the order of the data, each with where it is; for a row that is none, the `BadRow`."""
    if isinstance(source, MapSource):
        for index in range(len(source)):
            try:
                yield source.place(index), source.read(index)
            except BadRow as row:
                yield row.place, row
        return
    for index, value in enumerate(source.rows(start=0, shuffle_seed=None)):
        place = source.place(index)
        try:
            yield place, source.document(value, place)
        except BadRow as row:
            yield row.place, row


def text_of(value: object, place: str) -> str:
    """The value of a text field, if it is text.

    Raises:
        BadRow: for None, another type, or a str with lone surrogates, which no UTF-8 text can hold.
    """
    if value is None:
        raise BadRow("null", place, "the text is null")
    if not isinstance(value, str):
        raise BadRow("not_text", place, f"the text is of type {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            "invalid_utf8", place, f"the text has a lone surrogate at character {error.start}"
        ) from error
    return value
