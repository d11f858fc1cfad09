"""Rows of the formats that people hand over, as conversations.

A row's columns first get the names that the formats use (`columns`), then its format is told from
them, and its content is brought into one shape: messages with ``role`` and ``content``, or plain text.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.data.chat.template import Message, has_reserved
from torchtitan.data.source import BadRow

Format = Literal["auto", "messages", "sharegpt", "prompt_completion", "instruction", "text"]

ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Other words for the roles of messages."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row.

    Attributes:
        messages: with ``role`` and ``content``; empty for plain text.
        tools: descriptions of the tools, or None.
        variables: more that the template is given, such as ``enable_thinking``.
        given: how many of the messages are the prompt, in which nothing is learned.
        switches: for each message, whether it is to be learned; None where the row does not say.
        prompt: the part of a plain text in which nothing is learned.
        completion: the rest of it.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    given: int = 0
    switches: list[bool | None] = field(default_factory=list)
    prompt: str = ""
    completion: str = ""


def conversation(
    row: object, place: str, *, form: Format = "auto", columns: Mapping[str, str] | None = None
) -> Conversation:
    """The conversation of a row.

    Args:
        row: of any format.
        place: file and row, for messages.
        form: its format; ``auto`` tells it from the columns.
        columns: name in the format -> name in the data, where they differ.

    Raises:
        BadRow: if it is none.
    """
    if not isinstance(row, dict):
        raise BadRow("broken", place, f"not an object but a {type(row).__name__}")
    named = dict(row)
    for name, column in (columns or {}).items():
        if column not in row:
            raise _missing(place, column, row)
        named[name] = row[column]
    _check_text(named, place)
    if form == "auto":
        form = format_of(named, place)
    return _READERS[form](_Row(named, place))


def format_of(row: Mapping[str, Any], place: str) -> Format:
    """The format that the columns of a row belong to.

    Raises:
        BadRow: if they belong to none.
    """
    if row.get("messages") is not None:
        return "messages"
    if row.get("conversations") is not None:
        return "sharegpt"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if "instruction" in row and "output" in row:
        return "instruction"
    if "text" in row:
        return "text"
    raise BadRow(
        "missing_field",
        place,
        f"no known format has the columns {sorted(map(str, row))[:10]}: there must be messages, conversations, "
        "prompt and completion, instruction and output, or text; set `columns` to say which is which",
    )


@dataclass(frozen=True, slots=True)
class _Row:
    values: dict[str, Any]
    place: str

    def text(self, name: str) -> str:
        """A column that must be text."""
        if name not in self.values:
            raise _missing(self.place, name, self.values)
        value = self.values[name]
        if value is None:
            raise BadRow("null", self.place, f"{name} is null")
        if not isinstance(value, str):
            kind = type(value).__name__
            raise BadRow("not_text", self.place, f"{name} is of type {kind}, not a string")
        return value

    def extras(self) -> dict[str, Any]:
        """Tools and template variables, for a conversation."""
        tools = _from_json(self.values.get("tools"), "tools", self.place)
        if tools is not None and not isinstance(tools, list):
            raise BadRow("broken", self.place, f"tools is a {type(tools).__name__}, not a list")
        variables = _from_json(
            self.values.get("chat_template_kwargs"), "chat_template_kwargs", self.place
        )
        variables = {k: v for k, v in (variables or {}).items() if v is not None}
        return {
            "tools": [_without_null(tool) for tool in tools or []] or None,
            "variables": variables,
        }


def _from_messages(row: _Row) -> Conversation:
    listed = _from_json(row.values.get("messages"), "messages", row.place)
    return _chat(listed, row)


def _from_sharegpt(row: _Row) -> Conversation:
    listed = _from_json(row.values.get("conversations"), "conversations", row.place)
    system = row.values.get("system")
    if isinstance(system, str) and system and isinstance(listed, list):
        listed = [{"role": "system", "content": system}, *listed]
    return _chat(listed, row)


def _from_prompt_completion(row: _Row) -> Conversation:
    prompt, completion = row.values.get("prompt"), row.values.get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        after = (
            [{"role": "assistant", "content": completion}]
            if isinstance(completion, str)
            else completion
        )
        if not isinstance(before, list) or not isinstance(after, list):
            raise BadRow("null", row.place, "prompt or completion is null")
        return _chat([*before, *after], row, given=len(before))
    return Conversation(prompt=row.text("prompt"), completion=row.text("completion"))


def _from_instruction(row: _Row) -> Conversation:
    question, answer = row.text("instruction"), row.text("output")
    extra = row.values.get("input")
    if isinstance(extra, str) and extra:
        question = f"{question}\n{extra}"
    listed: list[Any] = []
    system = row.values.get("system")
    if isinstance(system, str) and system:
        listed.append({"role": "system", "content": system})
    for pair in row.values.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow("broken", row.place, "history is not a list of pairs")
        listed += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    listed += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(listed, row)


def _from_text(row: _Row) -> Conversation:
    return Conversation(completion=row.text("text"))


_READERS: dict[Format, Callable[[_Row], Conversation]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "prompt_completion": _from_prompt_completion,
    "instruction": _from_instruction,
    "text": _from_text,
}


def _chat(listed: Any, row: _Row, given: int = 0) -> Conversation:
    if not isinstance(listed, list):
        raise BadRow(
            "null" if listed is None else "broken", row.place, "there is no list of messages"
        )
    messages, switches = [], []
    for number, item in enumerate(listed, start=1):
        message, switch = _message(item, f"{row.place} message {number}")
        if switch and message["role"] != "assistant":
            raise BadRow(
                "broken",
                f"{row.place} message {number}",
                "is to be learned (train), but only the assistant's messages can be",
            )
        messages.append(message)
        switches.append(switch)
    return Conversation(messages=messages, switches=switches, given=given, **row.extras())


def _message(item: Any, place: str) -> tuple[Message, bool | None]:
    """One message in the shape that templates expect, and whether the row says that it is to be learned."""
    if not isinstance(item, dict):
        raise BadRow("broken", place, f"not an object but a {type(item).__name__}")
    message = {key: value for key, value in item.items() if value is not None}
    role = message.pop("from", None) or message.get("role")
    content = message.pop("value", None) if "content" not in message else message["content"]
    if not isinstance(role, str):
        raise BadRow("missing_field", place, "it has no role")
    switch = _switch(message.pop("train", None), message.pop("weight", None), place)
    calls = _from_json(message.get("tool_calls"), "tool_calls", place)
    if role == "function_call":
        calls, content = [_from_json(content, "the call", place)], None
        role = "assistant"
    message["role"] = ROLES.get(role, role)
    if "thinking" in message and "reasoning_content" not in message:
        message["reasoning_content"] = message.pop("thinking")
    message["content"] = _content(
        content, place, nothing=bool(calls) or "reasoning_content" in message
    )
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call(call, place) for call in calls]
    return message, switch


def _switch(train: Any, weight: Any, place: str) -> bool | None:
    for name, value in (("train", train), ("weight", weight)):
        if value is None:
            continue
        if value not in (0, 1):
            raise BadRow("broken", place, f"{name}={value!r} is neither 0 nor 1, false nor true")
        return bool(value)
    return None


def _content(content: Any, place: str, *, nothing: bool) -> str | None:
    """Text of a message; a list of text parts is joined by line ends, as servers do."""
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part if isinstance(part, str) else (part or {}).get("text")
            if not isinstance(text, str):
                raise BadRow(
                    "not_text", place, f"a part of the content is no text: {str(part)[:40]}"
                )
            texts.append(text)
        return "\n".join(texts)
    if content is None and not nothing:
        raise BadRow("null", place, "the content is null, and there is no tool call")
    if content is not None and not isinstance(content, str):
        raise BadRow("not_text", place, f"the content is of type {type(content).__name__}")
    return content


def _call(call: Any, place: str) -> dict[str, Any]:
    """A tool call whose arguments are an object, as a template prints them (servers parse them too)."""
    call = _without_null(_from_json(call, "a tool call", place))
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("broken", place, "a tool call has no name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a model may have called with text; it stays so
            arguments = json.loads(arguments)
    function = {**function, "arguments": arguments}
    return (
        {**call, "function": function}
        if "function" in call
        else {"type": "function", "function": function}
    )


def _from_json(value: Any, name: str, place: str) -> Any:
    """``value``, read from JSON if it is text: columns of tables cannot hold objects of mixed types."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("broken", place, f"{name} is text but no JSON ({error})") from error


def _without_null(value: Any) -> Any:
    """``value`` without the nulls with which tables fill the fields that an object lacks."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return value


def _check_text(row: dict[str, Any], place: str) -> None:
    """Every string must be text that UTF-8 can hold, without the characters that mark places here."""
    try:
        repr_bytes = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("invalid_utf8", place, "the row has a lone surrogate") from error
    except (ValueError, RecursionError) as error:
        raise BadRow("broken", place, f"the row cannot be read ({error})") from error
    if b"\xef\xb7" in repr_bytes and has_reserved(row):
        raise BadRow(
            "reserved",
            place,
            "the row has a noncharacter of Unicode, U+FDD0 to U+FDD3, which is in no text",
        )


def _missing(place: str, name: str, row: Mapping[str, Any]) -> BadRow:
    return BadRow("missing_field", place, f"no field {name!r} among {sorted(map(str, row))[:10]}")
