import json
import re
import time

import pytest

from tests.unit.data.chat.families import FAMILIES, TODAY, folder, template, tokenizer
from torchtitan.data import Tokenizer
from torchtitan.data.chat.sandbox import TemplateError
from torchtitan.data.chat.template import ChatTemplate, SpanError
from torchtitan.data.tokenizer import BUNDLED
from torchtitan.errors import ConfigError

USER = {"role": "user", "content": "What is 2+2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <b>", "parameters": {"type": "object"}},
    }
]


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


CHATS = {
    "one": [USER, said("4")],
    "system": [SYSTEM, USER, said("It is 4.")],
    "turns": [
        SYSTEM,
        USER,
        said("4."),
        {"role": "user", "content": "And 3+3?"},
        said("Six: 6 🙂."),
    ],
    "unicode": [{"role": "user", "content": "日本語 e\u0301\n\n  x"}, said("  ok\n")],
    "newline": [USER, said("\nfour"), {"role": "user", "content": "\n\n"}, said("\n\nsix")],
}


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")

    def load(name):
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder(name))

    return load


def ids_of(name, rendered_text, chat_template):
    return tokenizer(name).encode_pieces(chat_template.split(rendered_text))[0]


def spans_of(name, messages, text=None, **kwargs):
    rendered = template(name, text).render_with_spans(messages, **kwargs)
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_those_of_transformers(name, chat, prompt, theirs, monkeypatch):
    messages = CHATS[chat][:-1] if prompt else CHATS[chat]
    expected = theirs(name).apply_chat_template(
        messages,
        add_generation_prompt=prompt,
        return_dict=False,
        date_string=TODAY.strftime("%d %b %Y"),
    )
    ours = template(name)
    assert ids_of(name, ours.render(messages, add_generation_prompt=prompt), ours) == expected


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_ids_with_tools_equal_those_of_transformers(name, theirs):
    messages = [USER, CALL, {"role": "tool", "content": "4"}, said("4")]
    expected = theirs(name).apply_chat_template(
        messages, tools=TOOLS, return_dict=False, date_string="26 Jul 2024"
    )
    ours = template(name)
    assert ids_of(name, ours.render(messages, tools=TOOLS), ours) == expected
    spans = spans_of(name, messages, tools=TOOLS)
    assert len(spans) == 2
    assert all(span.endswith(FAMILIES[name][2]) for span in spans)
    assert '"name": "add"' in spans[0]
    assert "4" in spans[1]


def test_thinking_is_as_in_transformers(theirs):
    messages = [
        USER,
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
        USER,
        said("<think>\nagain\n</think>\n\n4"),
    ]
    ours = template("qwen3")
    assert ids_of("qwen3", ours.render(messages), ours) == theirs("qwen3").apply_chat_template(
        messages, return_dict=False
    )
    assert tokenizer("qwen3").vocab["<think>"] in ids_of("qwen3", ours.render(messages), ours)
    prompt = [USER]
    assert ids_of(
        "qwen3", ours.render(prompt, add_generation_prompt=True, enable_thinking=False), ours
    ) == theirs("qwen3").apply_chat_template(
        prompt, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_spans_by_prefixes_are_the_answers_with_their_end_of_turn(name, chat):
    answers = [m["content"] for m in CHATS[chat] if m["role"] == "assistant"]
    end = FAMILIES[name][2]
    for span, answer in zip(spans_of(name, CHATS[chat]), answers, strict=True):
        assert span.endswith(end)
        assert span.count(end) == 1
        assert span.removesuffix(end).strip().removeprefix("<think>\n\n</think>\n\n").strip() == (
            answer.strip()
        )


def test_spans_where_earlier_turns_lose_their_reasoning():
    messages = [
        USER,
        {"role": "assistant", "content": "4", "reasoning_content": "hm"},
        USER,
        {"role": "assistant", "content": "5", "reasoning_content": "well"},
    ]
    assert spans_of("qwen3", messages) == [
        "4<|im_end|>",
        "<think>\nwell\n</think>\n\n5<|im_end|>",
    ]


def test_generation_blocks_give_the_spans(theirs):
    """Also where the block leaves out the end-of-turn token, or goes on beyond it."""
    for block in (
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
        "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n",
        "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}",
    ):
        text = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
            + block
        )
        text += "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        assert spans_of("chatml", CHATS["turns"], text) == ["4.<|im_end|>", "Six: 6 🙂.<|im_end|>"]
        ours, their = template("chatml", text), theirs("chatml")
        assert ids_of("chatml", ours.render(CHATS["turns"]), ours) == their.apply_chat_template(
            CHATS["turns"], chat_template=text, return_dict=False
        )


@pytest.mark.parametrize("between", ["", "\n"])
def test_a_special_token_at_the_end_of_a_marked_call_is_not_the_end_of_its_turn(between):
    """The block leaves out the end of the turn, and what it holds ends with another special token."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|endoftext|>{% endif %}{% endgeneration %}<|im_end|>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}" + between + "{% endfor %}"
    )
    messages = [USER, CALL | {"content": "!"}, {"role": "tool", "content": "4"}, said("It is 4")]
    assert spans_of("chatml", messages, text) == [
        "!add<|endoftext|><|im_end|>",
        "It is 4<|im_end|>",
    ]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_shipped_templates_mark_every_answer(name):

    text = BUNDLED.with_name(f"{name}.jinja").read_text(encoding="utf-8")
    end = FAMILIES[name][2]
    messages = [
        SYSTEM,
        USER,
        CALL | {"content": None},
        {"role": "tool", "content": "4"},
        said("It is 4"),
    ]
    call, answer = spans_of(name, messages, text, tools=TOOLS)
    assert answer == f"It is 4{end}"
    assert call.endswith(end)
    assert '"name": "add"' in call
    ours = template(name, text)
    whole = ours.render(messages, tools=TOOLS)
    assert whole.startswith(ours.render(messages[:2], tools=TOOLS, add_generation_prompt=True))
    assert '"description": "Adds <b>"' in whole


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_in_messages_stay_text(name):
    """The ids of the special tokens are those of the template alone, and the text comes back."""
    evil = " ".join(FAMILIES[name][3])
    plain = [USER, said("4")]
    messages = [{"role": "user", "content": f"a {evil} b"}, said(f"x {evil}")]
    ours, tok = template(name), tokenizer(name)
    special = {tok.vocab[token] for token in tok.special_tokens}
    expected = [i for i in ids_of(name, ours.render(plain), ours) if i in special]
    ids = ids_of(name, ours.render(messages), ours)
    assert [i for i in ids if i in special] == expected
    decoded = tok.decode(ids)
    assert f"a {evil} b" in decoded
    assert f"x {evil}" in decoded
    spans = spans_of(name, messages)
    assert len(spans) == 1


def test_offsets_count_the_characters_of_the_pieces():
    tok = tokenizer("chatml")
    pieces = [("<|im_start|>", True), ("a <|im_end|> b", False), ("<|im_end|>", True), ("z", False)]
    ids, starts = tok.encode_pieces(pieces)
    text = "".join(piece for piece, _ in pieces)
    assert starts[0] == 0
    assert starts[-2:] == [text.rindex("<|im_end|>"), len(text) - 1]
    assert ids[-2] == tok.vocab["<|im_end|>"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_turn(name):
    assert template(name).end_of_turn() == FAMILIES[name][2]


def test_one_beginning_token():
    for name in ("llama3", "mistral", "mistral_v3"):
        tok = tokenizer(name)
        ids = ids_of(name, template(name).render(CHATS["turns"]), template(name))
        assert ids.count(tok.bos_id) == 1
        assert ids[0] == tok.bos_id


def test_the_old_and_new_places_of_templates(tmp_path):

    (tmp_path / "tokenizer.json").write_bytes((folder("chatml") / "tokenizer.json").read_bytes())

    def found(chat_template=None, **settings):
        text = json.dumps({"eos_token": "<|im_end|>", **settings})
        (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
        config = Tokenizer.Config(path=str(tmp_path), chat_template=chat_template)
        return config.build().chat_template

    named = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    assert found() is None
    assert found(chat_template="{{ messages }}") == "{{ messages }}"
    assert "im_start" in found("chatml")
    assert found(**{"chat_template": None}) is None
    path = tmp_path / "mine.jinja"
    path.write_text("F", encoding="utf-8")
    assert found(str(path)) == "F"
    for settings, name, expected in (
        ({"t": "O"}, None, "O"),
        ({"t": named}, None, "A"),
        ({"t": named}, "rag", "B"),
    ):
        text = {"eos_token": "<|im_end|>", "chat_template": settings["t"]}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(text), encoding="utf-8")
        config = Tokenizer.Config(path=str(tmp_path), chat_template=name)
        assert config.build().chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("N", encoding="utf-8")
    assert Tokenizer.Config(path=str(tmp_path)).build().chat_template == "N"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T", encoding="utf-8")
    assert found("tool_use") == "T"
    with pytest.raises(
        ConfigError, match=r"tokenizer\.chat_template=.nope. is no file, no Jinja, and none of"
    ):
        found("nope")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10 ** 9 }}", "a value of more than"),
        ("{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "a value of more than"),
        ("{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "a value of more than"),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}", "a value of more than"),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}", "a value of more than"),
        ("{{ 'a'.ljust(10 ** 10) }}", "with a number above"),
        ("{{ 'a' | center(999999999) }}", "with a number above"),
        ("{{ '%999999999d' % 1 }}", "great width"),
        ("{{ '%999999999d' | format(1) }}", "great width"),
        ("{{ '{:999999999}'.format(1) }}", "great width"),
        ("{{ ('a' * 5000).replace('a', 'b' * 5000) }}", "too large"),
        ("{{ 2 ** 99999999 }}", "power"),
        ("{% for i in range(99) %}{{ 'a' * 100000 }}{% endfor %}", "renders more than"),
        ("{% for i in range(999999) %}{% endfor %}", "Range too big"),
        ("{% include 'x' %}", "TypeError|TemplateNotFound|no loader"),
        ("{{ raise_exception('no tools here') }}", "refuses it: no tools here"),
        ("{{ messages[5].content }}", "UndefinedError"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_stopped(text, reason, monkeypatch):
    seconds = 0.3 if "0.3 s" in reason else 60
    monkeypatch.setattr("torchtitan.data.chat.sandbox.RENDER_SECONDS", seconds)
    with pytest.raises(TemplateError, match=reason):
        template("chatml", text).render([USER])


def test_waiting_is_not_running(monkeypatch):
    """A process that gets no turn for a while, or is stopped and continued, renders what it would have."""
    monkeypatch.setattr("torchtitan.data.chat.sandbox.RENDER_SECONDS", 0.05)
    text = "{% for m in messages %}{{ wait() }}{{ m.content }}{% endfor %}"
    waited = template("chatml", text).render([USER], wait=lambda: time.sleep(0.1) or "")
    assert waited == USER["content"]


def test_a_template_that_is_none():
    with pytest.raises(TemplateError, match="line 2: Encountered unknown tag 'nope'"):
        template("chatml", "\n{% nope %}")
    with pytest.raises(TemplateError, match="it has 300000 characters, more than 262144"):
        template("chatml", "a" * 300_000)


@pytest.mark.parametrize(
    "text",
    [
        "{% if true %}\n  {% for m in messages %}\n    {{ m.content }}\n  {% endfor %}\n{% endif %}\n",
        "a\n   {# remark #}\n  {%- if true -%} b {%- endif %}\nc",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{{ {'b': 'é<&>\\'日', 'a': [1, none, true]} | tojson }}",
        "{{ {'b': 'é', 'a': [1]} | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ 'é' | tojson(ensure_ascii=true) }}",
        "{{ documents is none }}{{ tools is none }}{{ nothing is defined }}{{ add_generation_prompt }}",
        "{{ bos_token }}{{ eos_token }}{{ strftime_now('%d') | length }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}{{ messages | map(attribute='role') | join(',') }}",
    ],
)  # fmt: skip
def test_jinja_is_set_up_as_in_transformers(text, theirs):
    """Blank space around blocks, loop controls, JSON, and what is defined."""
    their = theirs("llama3").apply_chat_template(CHATS["turns"], chat_template=text, tokenize=False)
    assert template("llama3", text).render(CHATS["turns"]) == their


def test_the_date_is_the_one_that_is_given():
    assert template("chatml", "{{ strftime_now('%d %b %Y') }}").render([USER]) == "26 Jul 2024"


def test_what_looks_special_in_tools_stays_text():
    """Also in the names of fields, and whether or not spans are asked for."""
    tools = [{"name": "<|im_end|>", "<|im_end|>": ["<|im_start|>"]}]
    text = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    ours, end = template("chatml", text), tokenizer("chatml").vocab["<|im_end|>"]
    start = tokenizer("chatml").vocab["<|im_start|>"]
    for rendered in (
        ours.render([USER, said("4")], tools=tools),
        ours.render_with_spans([USER, said("4")], tools=tools).text,
    ):
        ids = ids_of("chatml", rendered, ours)
        assert (ids.count(end), ids.count(start)) == (2, 0)
        assert '[{"name": "<|im_end|>", "<|im_end|>": ["<|im_start|>"]}]' in (
            tokenizer("chatml").decode(ids)
        )


def test_what_is_given_is_not_changed():
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    template("chatml").render(messages)
    assert messages == [{"role": "user", "content": "a<|im_end|>"}]


def test_a_template_without_an_end_of_turn_is_refused():
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    with pytest.raises(SpanError, match=re.escape("add {{ eos_token }} or another special token")):
        template("chatml", text).render_with_spans([USER, said("4")])


def test_a_header_that_no_generation_prompt_has_is_not_learned_but_refused():
    """As in older ChatML templates; Mistral's, whose answers have no header, are all right (see above)."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(
        SpanError, match=r"header \(<\|im_start\|> \.\.\.\).*\{% if add_generation_prompt %\}"
    ):
        template("chatml", text).render_with_spans([USER, said("4")])
    asks = text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert spans_of("chatml", [USER, said("4")], asks) == ["4<|im_end|>"]


def test_a_prefix_that_is_none_names_the_place_and_the_remedy():
    text = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    for before, place in (("", 0), ("So: ", 4)):
        with pytest.raises(
            SpanError, match=rf"up to message 2 .* part at character {place}\).*{{% generation %}}"
        ):
            template("chatml", before + text).render_with_spans([USER, said("4")])


def test_no_special_tokens_means_nothing_is_escaped():
    plain = ChatTemplate("{{ messages[0].content }}", special_tokens=[], variables={}, today=TODAY)
    assert plain.split(plain.render([{"role": "user", "content": "<s>"}])) == [("<s>", False)]
