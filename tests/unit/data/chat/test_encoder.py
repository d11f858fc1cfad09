import datetime
import functools
import itertools
import json
import shutil
import unicodedata

import numpy as np
import pytest

from tests.unit.data.chat.families import FAMILIES, folder, template, tokenizer
from torchtitan.batch import IGNORE_INDEX
from torchtitan.data import Files, Tokenizer
from torchtitan.data.chat.conversation import conversation
from torchtitan.data.chat.encoder import Encoder
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.sample import DroppedRow
from torchtitan.data.chat.show import BRACKETED, shown
from torchtitan.data.chat.source import Chat
from torchtitan.data.source import BadRow
from torchtitan.errors import ConfigError, DataError
from torchtitan.generation.source import Source as Generated
from torchtitan.models.decoder import Decoder

TURNS = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "six"},
    ]
}


def encoder(name="chatml", text=None, **options):
    return Encoder(tokenizer(name), template(name, text), **{"seq_len": 512, **options})


def sample(row, name="chatml", **options):
    return encoder(name, **options).encode(conversation(row, "here"), "here")


def learned(row, name="chatml", **options):
    """The runs of text that are targets."""
    found = sample(row, name, **options)
    labels = found.labels()
    runs, current = [], []
    for label in [*labels.tolist(), IGNORE_INDEX]:
        if label != IGNORE_INDEX:
            current.append(label)
        elif current:
            runs.append(tokenizer(name).decode(current))
            current = []
    return runs


def switched(*switches):
    answers = iter(switches)
    return {
        "messages": [
            m | {"train": next(answers)} if m["role"] == "assistant" else m
            for m in TURNS["messages"]
        ]
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_assistants_turns_are_learned_with_their_end(name):
    end = FAMILIES[name][2]
    first, last = learned(TURNS, name)
    assert first.replace(" ", "") == f"4{end}"
    assert last.removeprefix("<think>\n\n</think>\n\n").replace(" ", "") == f"six{end}"


def test_the_end_of_turn_is_a_target_exactly_once_also_where_it_is_the_padding_token():
    tok = tokenizer("chatml")
    end = tok.vocab["<|im_end|>"]
    assert tok.eos_id == end  # which is what fills rows up
    labels = sample(TURNS).labels()
    assert (labels == end).sum() == 2
    assert (sample(TURNS).tokens == end).sum() == 5  # with the system's and the user's


@pytest.mark.parametrize("packing", ["best_fit", "streaming", "none"])
def test_rows_that_are_filled_up_with_the_end_of_turn_still_learn_it(packing, tmp_path):
    """What fills a row up is told by its place, not by its id: the end of a turn, in a prompt too, stays what it is."""
    tok = tokenizer("chatml")
    end = tok.vocab["<|im_end|>"]
    rows = [
        {"messages": [*TURNS["messages"][:2], {"role": "user", "content": "x " * i}, TURNS["messages"][3]]}
        for i in range(12)
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    loader = ChatLoader.Config(
        sources=[Chat.Config(rows=Files.Config(path=str(tmp_path / "chats.jsonl")))],
        n_workers=0,
        packing=packing,
        cache_folder=str(tmp_path),
    )
    batch = loader.build(
        tokenizer=tok, seq_len=200, global_batch_rows=2, dp_rank=0, dp_world_size=1, seed=0
    ).next().batch  # fmt: skip
    n_samples = 0
    for tokens, labels, ids in zip(
        batch["tokens"], batch["labels"], batch["document_ids"], strict=True
    ):
        for number in ids.unique():
            own = labels[ids == number]
            if (own == IGNORE_INDEX).all():
                assert number == ids[-1]
                assert set(tokens[ids == number].tolist()) == {end}
                continue
            assert own[own != IGNORE_INDEX][-1] == end
            assert (own == end).sum() == 2
            assert (tokens[ids == number] == end).sum() == 5  # all seen by the answer, not only two
            n_samples += 1
    assert n_samples >= 2


AUTO_BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]}},
}  # fmt: skip


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_no_path_adds_a_second_beginning_token(adds_bos, template_has_bos, tmp_path):
    """Of a conversation it is the template's, on the way to training and to an answer; of text the tokenizer's."""
    shutil.copytree(folder("llama3"), tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    bos = next(t["id"] for t in data["added_tokens"] if t["content"] == "<|begin_of_text|>")
    AUTO_BOS["special_tokens"]["<|begin_of_text|>"]["ids"] = [bos]
    data["post_processor"] = AUTO_BOS if adds_bos else None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    path = tmp_path / "chat_template.jinja"
    text = path.read_text(encoding="utf-8")
    assert "{{- bos_token }}" in text
    if not template_has_bos:
        path.write_text(text.replace("{{- bos_token }}", ""), encoding="utf-8")
    tok = Tokenizer.Config(path=str(tmp_path)).build()
    assert tok.bos_id == bos
    loader = ChatLoader.Config(sources=[], date=str(datetime.date.today()))
    encoder = loader.encoder(tok, 512)
    trained = encoder.encode(conversation(TURNS, "here"), "here").tokens.tolist()
    asked = Generated(Decoder.__new__(Decoder), tok, {})
    prompt = asked.encode_chat(TURNS["messages"][:1])
    assert trained.count(bos) == prompt.count(bos) == int(template_has_bos)
    assert trained[: len(prompt)] == prompt
    plain = encoder.encode(conversation({"text": "abc"}, "here"), "here").tokens.tolist()
    assert plain[:-1] == asked.encode("abc")
    assert plain.count(bos) == 1
    assert plain[0] == bos
    for row in ({"prompt": "abc", "completion": "d"}, {"text": "one two three four five six"}):
        sample = encoder.encode(conversation(row, "here"), "here").tokens.tolist()
        prompt = encoder.prompt(conversation(row, "here"), "here")
        assert sample.count(bos) == 1
        assert sample[: len(prompt)] == prompt


def test_what_is_learned_can_be_chosen():
    assert learned(TURNS, learn="last") == ["six<|im_end|>"]
    assert learned(switched(False, True)) == ["six<|im_end|>"]
    assert learned(switched(True, None), learn="last") == ["4<|im_end|>", "six<|im_end|>"]
    everything = learned(TURNS, learn="all")
    whole = tokenizer("chatml").decode(sample(TURNS).tokens[1:].tolist())
    assert everything == [whole]
    assert learned(switched(False, None), learn="all")[0].endswith("<|im_start|>assistant\n")
    given = {"prompt": TURNS["messages"][:3], "completion": TURNS["messages"][3:]}
    assert learned(given) == ["six<|im_end|>"]


def test_an_answer_that_says_nothing_is_not_learned():
    """From empty answers a model would learn to be silent."""
    first, question = TURNS["messages"][1:3]

    def answered(*answers):
        asked = [TURNS["messages"][0], question]
        turns = [m for pair in zip(asked, answers, strict=False) for m in pair]
        return {"messages": turns}

    for nothing in ({"content": ""}, {"content": " \n"}):
        empty = {"role": "assistant", **nothing}
        assert learned(answered(first, empty)) == ["4<|im_end|>"]
        assert learned(answered(empty, first)) == ["4<|im_end|>"]
        for learn in ("assistant", "last"):
            with pytest.raises(DroppedRow) as drop:
                sample(answered(empty), learn=learn)
            assert drop.value.kind == "no_target"
        assert learned(answered(empty | {"train": True}))[0].endswith("<|im_end|>")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    assert "f" in learned({"messages": [TURNS["messages"][0], call]}, "qwen3")[0]


def test_labels_are_the_next_tokens():
    found = sample(TURNS)
    labels = found.labels()
    places = np.flatnonzero(labels != IGNORE_INDEX)
    assert (labels[places] == found.tokens[places + 1]).all()
    assert labels[-1] == IGNORE_INDEX
    assert (np.flatnonzero(found.learned) == places + 1).all()


def test_plain_text_and_completions():
    tok = tokenizer("llama3")
    text = sample({"text": "abc def"}, "llama3")
    assert text.tokens[0] == tok.bos_id
    assert text.tokens.tolist().count(tok.bos_id) == 1
    assert text.tokens[-1] == tok.eos_id
    assert learned({"text": "abc def"}, "llama3") == ["abc def<|eot_id|>"]
    row = {"prompt": "2+2=", "completion": "4"}
    assert learned(row, "llama3") == ["4<|eot_id|>"]
    labels = sample(row, "llama3").labels()
    assert (labels != IGNORE_INDEX).sum() == 2  # one token and the end: not off by one


@pytest.mark.parametrize("completion", ["\n\nfour", " four", "four", "ful"])
@pytest.mark.parametrize("prompt", ["Say:\n", "Say: ", "Say:", "wonder"])
def test_the_prompt_is_tokenised_as_at_inference(prompt, completion):
    """Where a token would reach over the join, the text is cut there."""
    found = sample({"prompt": prompt, "completion": completion})
    assert found.tokens[: (~found.learned).sum()].tolist() == tokenizer("chatml").encode(prompt)
    assert learned({"prompt": prompt, "completion": completion}) == [completion + "<|im_end|>"]


def post_processed(name, trim_offsets, kind, tmp_path):
    """The tokenizer of a family with a post-processor as GPT-2 (alone) and Llama 3 (with a template for bos) have."""
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": trim_offsets, "use_regex": True,
    }  # fmt: skip
    sequence = {"type": "Sequence", "processors": [byte_level]}
    roberta = {
        "type": "RobertaProcessing", "sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1],
        "trim_offsets": trim_offsets, "add_prefix_space": False,
    }  # fmt: skip
    shutil.copytree(folder(name), tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    data["post_processor"] = {"gpt2": byte_level, "llama3": sequence, "roberta": roberta}[kind]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return Tokenizer.Config(path=str(tmp_path)).build()


@functools.cache
def spaced(name):
    """Rows with spaces on both sides of the join, and their samples by a tokenizer without post-processor."""
    spaces, rows = ["", " ", "  ", "\n", " \n ", "   "], []
    for before, inside, after in itertools.product(spaces, spaces[:3], ["", "  "]):
        prompt, answer = f"Say:{before}", f"{inside}four{after}"
        rows.append({"prompt": prompt, "completion": answer})
        said = {"role": "assistant", "content": answer}
        asked = "<|im_end|>" * (before == " ") + prompt
        rows.append({"messages": [{"role": "user", "content": asked}, said]})
        found, tok = sample(rows[-2], name), tokenizer(name)
        assert tok.decode(found.tokens[found.learned].tolist()[:-1]) == answer
        assert tok.decode(found.tokens[~found.learned].tolist()).endswith(prompt)
    return [(row, sample(row, name)) for row in rows]


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize(("name", "kind"), [("chatml", "gpt2"), ("llama3", "llama3"), ("qwen3", "gpt2"), ("chatml", "roberta")])  # fmt: skip
def test_offsets_that_a_tokenizer_trims_do_not_move_what_is_learned(
    name, kind, trim_offsets, tmp_path
):
    """`trim_offsets` leaves the spaces of a token out of its offsets, so that it seems to begin after them."""
    tok = post_processed(name, trim_offsets, kind, tmp_path)
    assert tok.encode("  a b  ") == tokenizer(name).encode("  a b  ")
    ours = Encoder(tok, template(name), 512)
    for row, want in spaced(name):
        got = ours.encode(conversation(row, "here"), "here")
        assert got.tokens.tolist() == want.tokens.tolist(), row
        assert got.learned.tolist() == want.learned.tolist(), row


@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD"])
@pytest.mark.parametrize(
    "text", ["e\u0301", "\ufb01 \u00bd", "\u1e9b\u0323", "日本 \U0001f600\u200d"]
)
def test_text_that_a_tokenizer_normalises_does_not_move_what_is_learned(form, text, tmp_path):
    """Qwen's composes; the number of characters changes before and in the answer."""
    shutil.copytree(folder("qwen3"), tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    data["normalizer"] = {"type": form}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tok = Tokenizer.Config(path=str(tmp_path)).build()
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text} four"}]
    found = Encoder(tok, template("qwen3"), 512).encode(
        conversation({"messages": messages}, "here"), "here"
    )
    learned_text = tok.decode(found.tokens[found.learned].tolist())
    normal = unicodedata.normalize(form, f"{text} four<|im_end|>")
    assert learned_text.removeprefix("<think>\n\n</think>\n\n") == normal


def test_an_answer_that_begins_with_a_line_end():
    row = {"messages": [TURNS["messages"][0], {"role": "assistant", "content": "\n\nfour"}]}
    found = sample(row)
    prompt = encoder().template.render(row["messages"][:1], add_generation_prompt=True)
    ids, _ = tokenizer("chatml").encode_pieces(encoder().template.split(prompt))
    assert found.tokens[: len(ids)].tolist() == ids
    assert learned(row) == ["\n\nfour<|im_end|>"]


def test_special_tokens_in_an_answer_do_not_end_it():
    row = {"messages": [TURNS["messages"][0], {"role": "assistant", "content": "a<|im_end|>b"}]}
    assert learned(row) == ["a<|im_end|>b<|im_end|>"]
    assert (sample(row).labels() == tokenizer("chatml").vocab["<|im_end|>"]).sum() == 1


def test_long_conversations():
    n_tokens = len(sample(TURNS))
    with pytest.raises(DroppedRow, match=f"it has {n_tokens} tokens, more than seq_len=20") as drop:
        sample(TURNS, seq_len=20)
    assert drop.value.kind == "too_long"
    with pytest.raises(
        DataError, match=f"here: it has {n_tokens} tokens, more than seq_len=20; set"
    ):
        sample(TURNS, seq_len=20, too_long="error")
    cut = sample(TURNS, seq_len=n_tokens - 4, too_long="cut")
    assert cut.tokens.tolist() == sample(TURNS).tokens.tolist()[: n_tokens - 4]
    with pytest.raises(DroppedRow, match="nothing to learn is left") as drop:
        sample(TURNS, seq_len=5, too_long="cut")
    assert drop.value.kind == "cut_no_target"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": TURNS["messages"][:1]}, "no_target"),
        (switched(False, False), "no_target"),
        ({"text": ""}, "empty"),
        ({"text": " \n"}, "empty"),
        ({"prompt": "a", "completion": ""}, "empty"),
    ],
)
def test_rows_without_a_target_are_dropped_by_reason(row, kind):
    with pytest.raises(DroppedRow) as drop:
        sample(row)
    assert drop.value.kind == kind


def test_an_answer_that_nothing_comes_before_is_no_target():
    """Its only token cannot be told from anything, so that the row would have no label."""
    text = "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    row = {"messages": [{"role": "assistant", "content": "", "train": True}]}
    with pytest.raises(DroppedRow) as drop:
        encoder(text=text).encode(conversation(row, "here"), "here")
    assert drop.value.kind == "no_target"


def test_an_empty_prompt_is_legal():
    assert learned({"prompt": "", "completion": "x"}, "llama3") == ["x<|eot_id|>"]


def test_refusals():
    with pytest.raises(BadRow, match="the chat template cannot render it: the template refuses it"):
        sample({"messages": TURNS["messages"][1:]}, "mistral")
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        Encoder(tokenizer("chatml"), None, 64).encode(conversation(TURNS, "here"), "here")
    text = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(
        DataError, match=r"here: the text up to message 2 is not what .* begins with"
    ):
        sample(TURNS, text=text)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_that_begins_with_an_answer_is_a_bad_row(name):
    """One row like it must not end the run, whether the template cannot render nothing (Qwen3), renders it
    unlike all else (ChatML, with a system prompt of its own), or refuses it (Mistral)."""
    begins = {"messages": [TURNS["messages"][1], *TURNS["messages"][:2]]}
    with pytest.raises(BadRow, match=r"chat template cannot render it: the (conv|templ)") as bad:
        sample(begins, name)
    assert bad.value.kind == "template"
    assert bad.value.fault


def test_a_conversation_that_begins_with_an_answer_is_learned_where_blocks_mark_it():
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    begins = {"messages": [TURNS["messages"][1], *TURNS["messages"][:2]]}
    found = encoder(text=text).encode(conversation(begins, "here"), "here")
    learned_text = tokenizer("chatml").decode(found.tokens[found.learned].tolist())
    assert learned_text == "4<|im_end|>" * 2


def test_a_sample_is_shown_with_what_is_learned():
    text = shown(sample(TURNS), tokenizer("chatml"), BRACKETED)
    assert "<|im_start|>assistant\n⟦4<|im_end|>⟧\n<|im_start|>user\n3+3?" in text
    assert text.count("⟦") == 2
    everything = sample({"text": "abc def"}, learn="all")
    first = tokenizer("chatml").decode(everything.tokens[:1].tolist())
    text = shown(everything, tokenizer("chatml"), BRACKETED)
    assert text.startswith(f"{first}⟦")  # nothing comes before it, so that it is no target
    assert text.endswith("<|im_end|>⟧")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_what_the_first_learned_token_follows(name):
    found = sample(TURNS, name, learn="assistant")
    prompt = encoder(name).prompt(conversation(TURNS, "here"), "here")
    first = int(np.flatnonzero(found.learned)[0])
    shared = prompt[: min(first, len(prompt))]
    assert found.tokens[: len(shared)].tolist() == shared
    assert tokenizer(name).decode(prompt).count("2+2?") == 1
    assert "3+3?" not in tokenizer(name).decode(prompt)


def test_prompts_of_other_rows():
    def text(row):
        ids = encoder().prompt(conversation(row, "here"), "here")
        return tokenizer("chatml").decode(ids)

    assert text({"prompt": "one two", "completion": " three"}).endswith("one two")
    alone = text({"messages": [{"role": "user", "content": "Why?"}]})
    assert alone.endswith("Why?<|im_end|>\n<|im_start|>assistant\n")
    words = "one two three four five six seven eight"
    start = text({"text": words}).removeprefix("<|begin_of_text|>")
    assert words.startswith(start)
    assert 0 < len(start) < len(words)
    with pytest.raises(DroppedRow, match="no text"):
        text({"text": ""})
