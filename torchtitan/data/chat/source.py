"""Sources of conversations: the rows of another source, encoded."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.configurable import Problem
from torchtitan.data.chat.conversation import Conversation, Format, conversation
from torchtitan.data.chat.encoder import Encoder
from torchtitan.data.chat.sample import Pack, Sample, pack
from torchtitan.data.source import BadRow, MapSource, SequentialSource, Source
from torchtitan.errors import ConfigError

_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system",
    "text", "tools", "chat_template_kwargs",
)  # fmt: skip


class Chat(MapSource):
    """Conversations, each encoded when it is read.

    Args:
        rows: opened with `Source.Config.build_rows`.
        reader: from a row to its sample.
    """

    divisible = False

    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        """Where the rows are, and what is in them."""

        rows: Source.Config
        """Files, a data set of the hub, or the embedded questions and answers; its own weight and text_field are not used."""
        format: Format = "auto"
        """`messages`, `sharegpt`, `prompt_completion`, `instruction` (Alpaca) or `text`; auto tells it from the columns of each row."""
        columns: dict[str, str] = field(default_factory=dict)
        """Name of a column in the format -> its name in the data, where they differ: `{"instruction": "question"}`."""

        def check(self) -> Iterator[Problem]:
            """The columns are those of a format; the rows check themselves."""
            yield from Source.Config.check(self)
            for name in self.columns:
                if name not in _COLUMNS:
                    yield Problem(
                        f"columns.{name}",
                        self.columns[name],
                        "is a column of no format",
                        f"name one of {', '.join(_COLUMNS)}",
                    )

        def build(self) -> "MapSource | SequentialSource":
            """Conversations need more than a source knows.

            Raises:
                ConfigError: always.
            """
            raise ConfigError(
                "a Chat source is read by ChatLoader only; set data to ChatLoader.Config(sources=[...])"
            )

        def open(self, encoder: Encoder) -> "Chat | ChatStream":
            """Open the rows for ``encoder``.

            Raises:
                DataError: if they cannot be read.
            """
            rows, reader = self.rows.build_rows(), Reader(encoder, self.format, dict(self.columns))
            return Chat(rows, reader) if isinstance(rows, MapSource) else ChatStream(rows, reader)

    def __init__(self, rows: MapSource, reader: "Reader") -> None:
        self.rows = rows
        self.reader = reader

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Pack:
        """The pack of row ``index``, which is one sample."""
        return pack([self.sample(index)])

    def sample(self, index: int) -> Sample:
        """The sample of row ``index``."""
        return self.reader.sample(self.rows.read(index), self.rows.place(index))

    def prompts(self) -> Iterator[list[int]]:
        """See `Encoder.prompt`, of each sound row in the order of the data."""
        for index in range(len(self)):
            with contextlib.suppress(BadRow):
                yield self.reader.prompt(self.rows.read(index), self.place(index))

    def place(self, index: int) -> str:
        """Where row ``index`` is, for messages."""
        return self.rows.place(index)

    def describe(self) -> str:
        """Name and size of the rows, for messages."""
        return self.rows.describe()

    def fingerprint(self) -> str:
        """Of the rows and how they are read; the encoder is not in it."""
        return repr(
            (self.rows.fingerprint(), self.reader.form, sorted(self.reader.columns.items()))
        )


class ChatStream(SequentialSource):
    """Conversations that can only be read in order."""

    def __init__(self, source: SequentialSource, reader: "Reader") -> None:
        self.source = source
        self.reader = reader

    def rows(self, *, start: int, shuffle_seed: int | None) -> Iterator[object]:
        """The rows of one epoch, not yet encoded."""
        return self.source.rows(start=start, shuffle_seed=shuffle_seed)

    def prompts(self) -> Iterator[list[int]]:
        """See `Encoder.prompt`, of each sound row in the order of the data."""
        for index, value in enumerate(self.rows(start=0, shuffle_seed=None)):
            with contextlib.suppress(BadRow):
                yield self.reader.prompt(value, self.place(index))

    def place(self, row: int) -> str:
        """Where the row is, for messages."""
        return self.source.place(row)

    def document(self, value: object, place: str) -> Pack:
        """The pack of a row, which is one sample."""
        return pack([self.reader.sample(value, place)])

    def describe(self) -> str:
        """Name of the rows, for messages."""
        return self.source.describe()


@dataclass(frozen=True, slots=True)
class Reader:
    """From a row to its sample.

    Attributes:
        encoder: of this run.
        form: format of the rows.
        columns: name in the format -> name in the data.
    """

    encoder: Encoder
    form: Format
    columns: Mapping[str, str]

    def sample(self, row: Any, place: str) -> Sample:
        """The sample of a row; raises BadRow, or DroppedRow."""
        return self.encoder.encode(self._conversation(row, place), place)

    def prompt(self, row: Any, place: str) -> list[int]:
        """What a model is given to answer; raises BadRow."""
        return self.encoder.prompt(self._conversation(row, place), place)

    def _conversation(self, row: Any, place: str) -> Conversation:
        return conversation(row, place, form=self.form, columns=self.columns)
