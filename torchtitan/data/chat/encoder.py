"""From a conversation to tokens and the ones that are learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchtitan.data.chat.conversation import Conversation
from torchtitan.data.chat.sample import DroppedRow, Sample
from torchtitan.data.chat.sandbox import TemplateError
from torchtitan.data.chat.template import ESCAPE, ChatTemplate, Message, Rendered, SpanError
from torchtitan.data.document import opening
from torchtitan.data.source import BadRow
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import ConfigError, DataError

Learn = Literal["assistant", "last", "all"]
TooLong = Literal["drop", "cut", "error"]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes conversations for one run.

    Attributes:
        tokenizer: of the model.
        template: None if the tokenizer has none; then only plain text can be encoded.
        seq_len: tokens that a sample may have at most.
        learn: which of the assistant's turns are learned, unless a message says it itself; ``all`` is every token.
        too_long: what to do with a longer sample.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    seq_len: int
    learn: Learn = "assistant"
    too_long: TooLong = "drop"

    def encode(self, row: Conversation, place: str) -> Sample:
        """The sample of a conversation, of at most `seq_len` tokens and with at least one target.

        Raises:
            BadRow: if the template refuses the conversation.
            DroppedRow: if it is too long, or nothing is left to learn.
            DataError: if it is not known where the assistant speaks, or it is too long and that is an error.
            ConfigError: if there is no template.
        """
        sample = self._chat(row, place) if row.messages else self._plain(row, place)
        if not sample.learned[1:].any():
            raise DroppedRow("no_target", place, "there is nothing to learn in it")
        if len(sample) <= self.seq_len:
            return sample
        if self.too_long == "drop":
            reason = f"it has {len(sample)} tokens, more than seq_len={self.seq_len}"
            raise DroppedRow("too_long", place, reason)
        if self.too_long == "error":
            raise DataError(
                f"{place}: it has {len(sample)} tokens, more than seq_len={self.seq_len}; set a longer "
                "training.seq_len, or too_long to drop or cut"
            )
        cut = Sample(sample.tokens[: self.seq_len], sample.learned[: self.seq_len])
        if not cut.learned[1:].any():
            raise DroppedRow("cut_no_target", place, "nothing to learn is left in its first tokens")
        return cut

    def prompt(self, row: Conversation, place: str) -> list[int]:
        """Token ids for a model to answer: the conversation up to the first answer, or how a plain text begins.

        Raises:
            BadRow: if the template refuses the conversation, or there is no text.
            ConfigError: if there is no template.
        """
        if not row.messages:
            ids, _ = self._encode(row.prompt or row.completion, False)
            if not ids:
                raise DroppedRow("empty", place, "it has no text")
            bos_id = self.tokenizer.bos_id
            bos = [] if bos_id is None else [bos_id]
            return [*bos, *(ids if row.prompt else opening(ids))]
        roles = [message["role"] for message in row.messages]
        answers = [i for i in range(row.given, len(roles)) if roles[i] == "assistant"]
        asked = row.messages[: min(answers, default=len(roles))]
        template = self._known_template()
        try:
            text = template.render(
                asked, tools=row.tools, add_generation_prompt=True, **row.variables
            )
        except TemplateError as error:
            raise BadRow(
                "template", place, f"the chat template cannot render it: {error}"
            ) from error
        return self._encode(text, True)[0]

    def _known_template(self) -> ChatTemplate:
        if self.template is None:
            raise ConfigError(
                "the tokenizer has no chat template, and the data has conversations; set tokenizer.chat_template to "
                "a file with one, or to chatml or llama3 if the vocabulary has those tokens"
            )
        return self.template

    def _chat(self, row: Conversation, place: str) -> Sample:
        template = self._known_template()
        try:
            rendered = self._rendered(row, template)
        except SpanError as error:
            raise DataError(f"{place}: {error}") from error
        except TemplateError as error:
            raise BadRow(
                "template", place, f"the chat template cannot render it: {error}"
            ) from error
        spans, learned = rendered.spans, self._learned_turns(row)
        starts = [start for start, _ in spans]
        ids, places = self._ids(rendered.text, starts, place)
        flags = np.full(len(ids), self.learn == "all")
        for (start, end), is_learned in zip(spans, learned, strict=True):
            flags[(places >= start) & (places < end)] = is_learned
        return Sample(np.array(ids, dtype=np.int32), flags)

    def _rendered(self, row: Conversation, template: ChatTemplate) -> Rendered:
        if self.learn == "all" and not any(switch is False for switch in row.switches):
            text = template.render(row.messages, tools=row.tools, **row.variables)
            return Rendered(text, [])
        return template.render_with_spans(row.messages, tools=row.tools, **row.variables)

    def _learned_turns(self, row: Conversation) -> list[bool]:
        """For each assistant message, whether it is learned; none if all tokens are."""
        if self.learn == "all" and not any(switch is False for switch in row.switches):
            return []
        turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        return [
            switch
            if (switch := row.switches[i]) is not None
            else self.learn == "all"
            or (
                i >= row.given
                and (self.learn != "last" or i == turns[-1])
                and _says_something(row.messages[i])
            )
            for i in turns
        ]

    def _plain(self, row: Conversation, place: str) -> Sample:
        text = row.prompt + row.completion
        if not text.strip() or not row.completion:
            raise DroppedRow("empty", place, "it has no text, or no completion")
        if row.prompt:
            ids, places = self._ids(text, [len(row.prompt)], place, template=False)
            flags = np.full(len(ids), True) if self.learn == "all" else places >= len(row.prompt)
        else:
            ids = self.tokenizer.encode(text)  # slice by slice: a text may be a book
            flags = np.full(len(ids), True)
        bos_id, eos_id = self.tokenizer.bos_id, self.tokenizer.eos_id
        if bos_id is not None:
            ids, flags = [bos_id, *ids], np.concatenate([[False], flags])
        return Sample(np.array([*ids, eos_id], dtype=np.int32), np.concatenate([flags, [True]]))

    def _ids(
        self, text: str, starts: Sequence[int], place: str, *, template: bool = True
    ) -> tuple[list[int], np.ndarray]:
        """Token ids, and for each the character of ``text`` at which it begins.

        Where a token reaches over the beginning of an answer, the text is cut there: when the model
        generates, the prompt ends there too.
        """
        ids, places = self._encode(text, template)
        inner = sorted({start for start in starts if 0 < start < len(text)})
        joins = [start for start in inner if not (places == start).any()]
        if not joins:
            return ids, places
        whole, ids, parts = self.tokenizer.decode(ids), [], []
        for start, end in zip([0, *joins], [*joins, len(text)], strict=True):
            part, part_places = self._encode(text[start:end], template)
            ids += part
            parts.append(part_places + start)
        if self.tokenizer.decode(ids) != whole:
            raise BadRow(
                "join",
                place,
                "the tokenizer has no tokens that end where the prompt does; begin the answer with a space",
            )
        return ids, np.concatenate(parts)

    def _encode(self, text: str, template: bool) -> tuple[list[int], np.ndarray]:
        """Ids of rendered text, and places in it, its `ESCAPE` characters counted."""
        pieces = self.template.split(text) if template and self.template else [(text, False)]
        ids, starts = self.tokenizer.encode_pieces(pieces)
        places = np.array(starts, dtype=np.int64)
        found = text.find(ESCAPE)
        while found >= 0:
            places[places >= found] += 1
            found = text.find(ESCAPE, found + 1)
        return ids, places


def _says_something(message: Message) -> bool:
    """Whether there is more in an answer than its end: from empty ones a model would learn to be silent."""
    texts = [message.get("content"), message.get("reasoning_content")]
    return bool(message.get("tool_calls")) or any(text and text.strip() for text in texts)
