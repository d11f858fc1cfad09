import json

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
    ("names", "role"),
    [
        ("user human prompter", "user"),
        ("assistant gpt bot model chatgpt", "assistant"),
        ("tool function function_response observation ipython", "tool"),
        ("system", "system"),
        ("developer", "developer"),
    ],
)
def test_other_words_for_a_role(names, role):
    for name in names.split():
        for turn in ({"role": name, "content": "x"}, {"from": name, "value": "x"}):
            assert messages({"messages": [turn]}) == [{"role": role, "content": "x"}], name


def test_the_system_column_of_sharegpt_comes_first():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    system = {"role": "system", "content": "s"}
    assert messages({"conversations": turns, "system": "s"}) == [system, *CHAT]
    for nothing in ("", None):
        assert messages({"conversations": turns, "system": nothing}) == CHAT


def test_tools_and_variables_are_objects_or_json():
    """Tables cannot hold objects of mixed types, so that many sets have them as text."""
    tools, variables = [{"name": "f", "x": {"y": [1, None]}}], {"enable_thinking": False}
    for row in (
        {"tools": tools, "chat_template_kwargs": variables},
        {"tools": json.dumps(tools), "chat_template_kwargs": json.dumps(variables)},
    ):
        found = conversation({"messages": CHAT, **row}, "here")
        assert (found.tools, found.variables) == (tools, variables)
    for nothing in ("", " ", "[]", None, []):
        assert conversation({"messages": CHAT, "tools": nothing}, "here").tools is None
    with pytest.raises(BadRow, match="chat_template_kwargs is text but no JSON"):
        conversation({"messages": CHAT, "chat_template_kwargs": "{"}, "here")


def test_arguments_of_a_call_that_are_no_json_stay_text():
    call = {"type": "function", "function": {"name": "f", "arguments": "x = 1"}}
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert messages(row)[1]["tool_calls"] == [call]
    plain = {"messages": [{"role": "assistant", "tool_calls": json.dumps([call["function"]])}]}
    assert messages(plain)[0]["tool_calls"] == [call]


def test_content_may_be_parts_or_null_beside_reasoning():
    parts = [{"type": "text", "text": "one"}, "two"]
    assert messages({"messages": [CHAT[0] | {"content": parts}]})[0]["content"] == "one\ntwo"
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert messages({"messages": [CHAT[0], thought]})[1] == thought
    assert conversation({"messages": [CHAT[1] | {"weight": 1}]}, "here").switches == [True]


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
