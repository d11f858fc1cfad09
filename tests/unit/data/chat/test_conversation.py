import pytest

from torchtitan.data.chat.conversation import conversation
from torchtitan.data.source import BadRow

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def messages(row, **options):
    return conversation(row, "here", **options).messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": [m | {"name": None, "tool_calls": None} for m in CHAT], "tools": None},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a", "text": "all of it"},
        {"prompt": [CHAT[0]], "completion": [CHAT[1]]},
        {"prompt": "q", "completion": [CHAT[1]]},
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        {"messages": [CHAT[0] | {"content": [{"type": "text", "text": "q"}]}, CHAT[1]]},
    ],
)
def test_every_format_becomes_messages(row):
    assert messages(row) == CHAT


def test_the_other_columns_of_instructions():
    row = {"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["b", "c"]]}
    assert [(m["role"], m["content"]) for m in messages(row)] == [
        ("system", "s"),
        ("user", "b"),
        ("assistant", "c"),
        ("user", "q\nx"),
        ("assistant", "a"),
    ]


def test_columns_are_mapped_and_a_missing_one_is_named():
    row = {"question": "q", "answer": "a"}
    columns = {"instruction": "question", "output": "answer"}
    assert messages(row, columns=columns) == CHAT
    with pytest.raises(BadRow, match=r"no field 'answers' among \['answer', 'question'\]"):
        messages(row, columns={"output": "answers"})


def test_prompts_are_given_and_text_is_all_completion():
    row = conversation({"prompt": CHAT, "completion": CHAT}, "here")
    assert row.given == 2
    assert len(row.messages) == 4
    plain = conversation({"prompt": "2+2=", "completion": "4"}, "here")
    assert (plain.prompt, plain.completion) == ("2+2=", "4")
    assert conversation({"text": "abc"}, "here").completion == "abc"


def test_tools_calls_reasoning_and_switches():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            CHAT[0],
            {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "a", "thinking": "hm", "train": True},
        ],
        "tools": '[{"type": "function", "function": {"name": "f", "strict": null}}]',
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    found = conversation(row, "here")
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert found.messages[1]["content"] is None
    assert found.messages[3]["reasoning_content"] == "hm"
    assert found.switches == [None, False, None, True]
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]
    assert found.variables == {"enable_thinking": False}
    called = messages(
        {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]}
    )
    assert called[0]["role"] == "assistant"
    assert called[0]["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (3, "broken", "not an object but a int"),
        ({"x": 1}, "missing_field", "no known format has the columns"),
        ({"messages": [3]}, "broken", "here message 1: not an object"),
        ({"messages": [{"content": "x"}]}, "missing_field", "it has no role"),
        ({"messages": [{"role": "user", "content": None}]}, "null", "no tool call"),
        ({"messages": [{"role": "user"}]}, "null", "no tool call"),
        ({"messages": [{"role": "user", "content": 3}]}, "not_text", "of type int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text", "no text"),
        ({"messages": [CHAT[0] | {"train": True}]}, "broken", "only the assistant's"),
        ({"messages": [CHAT[1] | {"weight": 2}]}, "broken", "weight=2 is neither"),
        ({"messages": "nope"}, "broken", "no JSON"),
        ({"messages": CHAT, "tools": "{}"}, "broken", "tools is a dict"),
        ({"instruction": "q", "output": None}, "null", "output is null"),
        ({"instruction": 4, "output": "a"}, "not_text", "instruction is of type int"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "broken", "list of pairs"),
        ({"text": "\ud800"}, "invalid_utf8", "lone surrogate"),
        ({"text": "a\ufdd0"}, "reserved", "noncharacter"),
        ({"prompt": None, "completion": CHAT}, "null", "prompt or completion is null"),
    ],
)
def test_a_row_that_is_none_says_why(row, kind, reason):
    with pytest.raises(BadRow, match=reason) as found:
        conversation(row, "here")
    assert found.value.kind == kind
