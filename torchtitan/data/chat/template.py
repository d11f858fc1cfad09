"""A chat template: from messages to the text that the model sees, and where in it the assistant speaks."""

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.data.chat.sandbox import (
    SPAN_END,
    SPAN_START,
    Environment,
    TemplateError,
    texts_of,
)
from torchtitan.data.tokenizer import Tokenizer

Message = dict[str, Any]
Span = tuple[int, int]

ESCAPE = "\ufdd2"
"""Noncharacter set into what looks like a special token in a message, so that it is none."""
RESERVED = re.compile("[\ufdd0-\ufdd3]")

_FIX = (
    "put {% generation %} and {% endgeneration %} around what the assistant says, its end-of-turn token "
    "included, and set tokenizer.chat_template to that file"
)

_NOTHING_ASKED = (
    "the conversation begins with an answer, and what it begins with before that cannot be told"
)


class SpanError(TemplateError):
    """The assistant's part of a rendered conversation cannot be told for sure."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: with `ESCAPE` inside what only looks like a special token.
        spans: for each assistant message, start and end of what it says, from after its header to the end of
            its end-of-turn token.
    """

    text: str
    spans: list[Span]


class ChatTemplate:
    """A compiled template and the special tokens of its tokenizer.

    Args:
        text: Jinja, as in ``chat_template.jinja``.
        special_tokens: names of the tokenizer's special tokens.
        variables: ``bos_token``, ``eos_token`` and the like.
        today: what the template takes for the date.

    Raises:
        TemplateError: if ``text`` is no template.
    """

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Sequence[str],
        variables: Mapping[str, str],
        today: datetime.date,
    ) -> None:
        self.text = text
        self.today = today
        self._environment = Environment(today)
        self._template = self._environment.compile_template(text)
        self._variables = dict(variables)
        self._turn_end: str | None = None
        names = sorted((name for name in special_tokens if len(name) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._special_tokens = list(special_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that are not forked: compiled again there."""
        again = partial(
            ChatTemplate,
            self.text,
            special_tokens=self._special_tokens,
            variables=self._variables,
            today=self.today,
        )
        return again, ()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation, with `ESCAPE` in what only looks like a special token.

        Raises:
            TemplateError: if the template refuses it.
        """
        return self._render(
            self._escaped(list(messages)), self._escaped(tools), add_generation_prompt, variables
        )

    def render_with_spans(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **variables: Any
    ) -> Rendered:
        """The text and the assistant's spans in it.

        They come from the template's ``{% generation %}`` blocks. A template without them is asked for the
        conversation up to each assistant message, with the header of an answer, which must be what the
        whole begins with.

        Raises:
            SpanError: if neither works; the text names the remedy.
            TemplateError: if the template refuses the conversation.
        """
        escaped, tools = self._escaped(list(messages)), self._escaped(tools)
        self._environment.mark_spans = True
        try:
            marked = self._render(escaped, tools, False, variables)
        finally:
            self._environment.mark_spans = False
        text, spans = _unmarked(marked)
        turns = [i for i, message in enumerate(escaped) if message["role"] == "assistant"]
        if len(spans) != len(turns):
            spans = self._prefix_spans(text, escaped, tools, turns, variables)
        return Rendered(text, [self._with_end_of_turn(text, span) for span in spans])

    def escaped(self, text: str) -> str:
        """``text``, to be put behind rendered text: what looks like a special token in it is none."""
        return self._escaped(text)

    def end_of_turn(self) -> str:
        """The special token that ends the assistant's turn.

        Raises:
            TemplateError: if there is none.
        """
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rendered = self.render_with_spans(probe)
        start, end = rendered.spans[-1]
        return [found[0] for found in self._special.finditer(rendered.text, start, end)][-1]

    def _ends_a_turn(self, token: str) -> bool:
        """Whether answers end with ``token``; asked for one that stands behind another, as behind the end of a tool call."""
        if self._turn_end is None:
            self._turn_end = ""  # in the question itself, the answer is no
            self._turn_end = self.end_of_turn()
        return token == self._turn_end

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Rendered text in pieces: special tokens (True), and the text between them without `ESCAPE`."""
        pieces, place = [], 0
        for found in self._special.finditer(text):
            pieces += [(text[place : found.start()], False), (found[0], True)]
            place = found.end()
        pieces.append((text[place:], False))
        return [(piece.replace(ESCAPE, ""), special) for piece, special in pieces if piece]

    def _render(
        self, messages: list[Message], tools: Any, prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        return self._environment.render(
            self._template,
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": prompt,
                **self._variables,
                **variables,
            },
        )

    def _escaped(self, value: Any) -> Any:
        """``value`` with an `ESCAPE` after the first character of each special token's name."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][0] + ESCAPE + found[0][1:], value)
        if isinstance(value, dict):
            return {self._escaped(key): self._escaped(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escaped(item) for item in value]
        return value

    def _prefix_spans(
        self,
        text: str,
        messages: list[Message],
        tools: Any,
        turns: list[int],
        variables: Mapping[str, Any],
    ) -> list[Span]:
        """Spans by rendering prefixes of the conversation.

        A turn ends where the conversation that ends with it does. Some templates render the last turn
        unlike the earlier ones (Qwen3 leaves out old reasoning); there the turn goes on to the first
        token of the kind that ended it when it was last.
        """
        spans: list[Span] = []
        for turn in turns:
            prompt = self._beginning(text, messages[:turn], tools, variables)
            if turn == turns[0]:
                self._check_generation_prompt(text, prompt, messages[:turn], tools, variables)
            if not text.startswith(prompt):
                raise SpanError(
                    f"the text up to message {turn + 1} is not what the conversation begins with (they part "
                    f"at character {_parting(text, prompt)}), so what the assistant says there is unknown; {_FIX}"
                )
            answered = self._render(messages[: turn + 1], tools, False, variables)
            start = len(prompt)
            if text.startswith(answered):
                spans.append((start, len(answered)))
                continue
            ends = [
                found[0] for found in self._special.finditer(answered, _parting(answered, prompt))
            ]
            end = text.find(ends[-1], start) if ends else -1
            if end < 0:
                raise SpanError(
                    f"the end of message {turn + 1} cannot be told: the template renders it in another way "
                    f"when the conversation goes on; {_FIX}"
                )
            spans.append((start, end + len(ends[-1])))
        return spans

    def _beginning(
        self, text: str, asked: list[Message], tools: Any, variables: Mapping[str, Any]
    ) -> str:
        """What a model is given to answer ``asked``.

        Raises:
            TemplateError: if ``asked`` is nothing, which many templates cannot render or render unlike all else.
        """
        try:
            prompt = self._render(asked, tools, True, variables)
        except TemplateError as error:
            if asked:
                raise
            raise TemplateError(f"{_NOTHING_ASKED} ({error}); {_FIX}") from error
        if not asked and not text.startswith(prompt):
            raise TemplateError(f"{_NOTHING_ASKED}; {_FIX}")
        return prompt

    def _check_generation_prompt(
        self, text: str, prompt: str, asked: list[Message], tools: Any, variables: Mapping[str, Any]
    ) -> None:
        """See that a template without a generation prompt has no header before answers, or it would be taken for one.

        Raises:
            SpanError: if the answer begins with the token that begins a question.
        """
        header = self._special.match(text, len(prompt))
        if header is None or prompt != self._render(asked, tools, False, variables):
            return
        question = self._render([{"role": "user", "content": "a"}], None, False, variables)
        if header[0] in question:
            raise SpanError(
                f"the template writes a header ({header[0]} ...) before what the assistant says, but not when it is asked for "
                "an answer, so the header would be learned; end it with {% if add_generation_prompt %} and that header, or "
                + _FIX
            )

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """``span`` up to the end of its last special token, which may follow it at once."""
        start, end = span
        following = self._special.match(text, end)
        inside = [found.end() for found in self._special.finditer(text, start, end)]
        ends_inside = bool(inside) and not text[inside[-1] : end].strip()
        if ends_inside and following and inside[-1] == end:
            ends_inside = not self._ends_a_turn(following[0])
        if ends_inside:
            return start, inside[-1]
        if following:
            return start, following.end()
        raise SpanError(
            "the template ends the assistant's turn with no special token, so the model would not learn to stop; "
            "add {{ eos_token }} or another special token after the answer, and set tokenizer.chat_template to that file"
        )


def has_reserved(value: Any) -> bool:
    """Whether a noncharacter that marks places here occurs anywhere in ``value``."""
    return any(RESERVED.search(text) for text in texts_of(value))


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """The text without the marks of generation blocks, and where they were."""
    text, spans, start = "", [], 0
    for piece in re.split(f"([{SPAN_START}{SPAN_END}])", marked):
        if piece == SPAN_START:
            start = len(text)
        elif piece == SPAN_END:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, spans


def _parting(left: str, right: str) -> int:
    """Number of characters that both begin with."""
    both = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(left), len(right)))


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer in the tokenizer's chat template; None if there is no template, or it does not tell."""
    if tokenizer.chat_template is None:
        return None
    try:
        template = ChatTemplate(
            tokenizer.chat_template,
            special_tokens=tokenizer.special_tokens,
            variables=tokenizer.named_tokens,
            today=datetime.date.today(),
        )
        return tokenizer.vocab[template.end_of_turn()]
    except TemplateError:
        return None
