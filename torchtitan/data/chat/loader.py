"""Batches of packed conversations: the `Loader` for supervised fine-tuning."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan.config.configurable import Problem
from torchtitan.data.bad_rows import BadRowPolicy
from torchtitan.data.chat.conversation import Conversation
from torchtitan.data.chat.encoder import Encoder, Learn, TooLong
from torchtitan.data.chat.prepared import Prepared, prepare
from torchtitan.data.chat.sandbox import TemplateError
from torchtitan.data.chat.source import Chat
from torchtitan.data.chat.stream import SamplePacking
from torchtitan.data.chat.template import ChatTemplate
from torchtitan.data.loader import Loader, take_turns
from torchtitan.data.source import MapSource, SequentialSource, Source
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import ConfigError


class ChatLoader(Loader):
    """Encodes conversations, packs whole ones into rows, and batches them, for one data rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Loader.Config):
        """Conversations, what is learned in them, and how they share rows."""

        OPERATIONAL: ClassVar[frozenset[str]] = Loader.Config.OPERATIONAL | {"cache_folder"}

        sources: list[Source.Config]
        """`Chat` sources; several are mixed by their weights, as shares of the tokens."""
        learn: Learn = "assistant"
        """What counts in the loss: the assistant's turns, its last one, or all tokens. A message can say it itself
        (`train: true` or `false`, or `weight: 1` or `0`). The end-of-turn token is learned with its turn."""
        too_long: TooLong = "drop"
        """What to do with a conversation of more than seq_len tokens: drop it and count it, cut off its end, or stop."""
        packing: Literal["best_fit", "streaming", "none"] = "best_fit"
        """How conversations share rows, each seeing only itself: `best_fit` encodes all of them first and keeps the
        result (data on this machine only); `streaming` fills rows from a few that are held ready; `none` is one a row,
        encoded first too unless the data is streamed."""
        look_ahead: int = 32
        """Conversations that each row of the global batch holds ready with streaming packing."""
        date: str = "2024-07-26"
        """The date that templates with `strftime_now` write, YYYY-MM-DD; fixed, so that a resumed run sees the same tokens."""
        cache_folder: str | None = None
        """Where prepared conversations are kept; None is ~/.cache/torchtitan."""

        def check(self) -> Iterator[Problem]:
            """The sources are conversations; ranges."""
            yield from Loader.Config.check(self)
            for number, source in enumerate(self.sources):
                if not isinstance(source, Chat.Config):
                    yield Problem(
                        f"sources.{number}",
                        type(source).__qualname__,
                        "is no source of conversations",
                        "wrap it: Chat.Config(rows=...)",
                    )
                elif self.packing == "best_fit" and getattr(source.rows, "streaming", False):
                    yield Problem(
                        "packing",
                        self.packing,
                        f"needs all rows at once, but sources.{number}.rows is streamed",
                        "set packing=streaming, or rows.streaming=false",
                    )
            if self.look_ahead < 1:
                yield Problem("look_ahead", self.look_ahead, "is less than 1", "set 1 or more")
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                yield Problem("date", self.date, "is no date", "write YYYY-MM-DD")

        def check_epochs(self, epochs: float) -> Iterator[Problem]:
            """See `Loader.Config.check_epochs`."""
            reason = "cannot be counted: "
            if self.packing == "streaming":
                yield Problem(
                    "training.epochs",
                    epochs,
                    reason + "data.packing=streaming fills rows while it reads",
                    "set data.packing=best_fit, or training.steps and training.epochs=None",
                )
            for number, source in enumerate(self.sources):
                if isinstance(source, Chat.Config) and getattr(source.rows, "streaming", False):
                    yield Problem(
                        "training.epochs",
                        epochs,
                        reason + f"data.sources.{number}.rows is streamed, so its end is not known",
                        "set its streaming=False, or training.steps and training.epochs=None",
                    )

        def encoder(self, tokenizer: Tokenizer, seq_len: int) -> Encoder:
            """The encoder of a run with these settings.

            Raises:
                ConfigError: if the tokenizer's chat template cannot be read.
            """
            template = None
            if tokenizer.chat_template is not None:
                try:
                    template = ChatTemplate(
                        tokenizer.chat_template,
                        special_tokens=tokenizer.special_tokens,
                        variables=tokenizer.named_tokens,
                        today=datetime.date.fromisoformat(self.date),
                    )
                except TemplateError as error:
                    raise ConfigError(
                        f"the chat template cannot be read: {error}; set tokenizer.chat_template to another one"
                    ) from error
            return Encoder(tokenizer, template, seq_len, self.learn, self.too_long)

        def open_sources(
            self, tokenizer: Tokenizer, seq_len: int, policy: BadRowPolicy
        ) -> list[MapSource | SequentialSource]:
            """Open the conversations; unless packing is ``streaming``, encode and pack all that can be read in any order.

            Raises:
                ConfigError: if they are to be packed first and can only be read in order.
                DataError: if they cannot be read, or nothing is left of them.
            """
            encoder = self.encoder(tokenizer, seq_len)
            opened = [s.open(encoder) for s in self.sources if isinstance(s, Chat.Config)]
            if self.packing == "streaming":
                return list(opened)
            for source in opened:
                if not isinstance(source, Chat) and self.packing == "best_fit":
                    raise ConfigError(
                        f"data.packing=best_fit needs all rows at once, but {source.describe()} can only be read in "
                        "order; set data.packing=streaming"
                    )
            return [
                prepare(
                    source,
                    seq_len=seq_len,
                    shared=self.packing == "best_fit",
                    policy=policy,
                    cache_folder=self.cache_folder,
                )
                if isinstance(source, Chat)
                else source
                for source in opened
            ]

        def packed_rows(self, sources: Sequence[MapSource | SequentialSource]) -> int | None:
            """See `Loader.Config.packed_rows`; a pack is a row."""
            packs = [source for source in sources if isinstance(source, Prepared)]
            return sum(map(len, packs)) if len(packs) == len(sources) else None

        def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
            """Token ids of ``text`` as a user's question, for the assistant to answer; as it is where there is no template."""
            if tokenizer.chat_template is None:
                return Loader.Config.prompt(self, text, tokenizer)
            question = Conversation(messages=[{"role": "user", "content": text}])
            return self.encoder(tokenizer, 0).prompt(question, "the prompt")

        def first_prompts(self, tokenizer: Tokenizer, seq_len: int, n: int) -> list[list[int]]:
            """See `Loader.Config.first_prompts`: conversations up to the first answer."""
            encoder = self.encoder(tokenizer, seq_len)
            opened = [s.open(encoder) for s in self.sources if isinstance(s, Chat.Config)]
            return take_turns((source.prompts() for source in opened), seq_len, n)

        def sample_packing(self) -> SamplePacking:
            """How streams fill their rows; packs that are made already are taken one by one."""
            whole = self.packing != "streaming"
            return SamplePacking(look_ahead=1 if whole else self.look_ahead, one_per_row=whole)
