import itertools
import json
import shutil
import unicodedata

import numpy as np
import pytest

from tests.unit.data.chat.families import FAMILIES, folder, template, tokenizer
from torchtitan.batch import IGNORE_INDEX
from torchtitan.data import Tokenizer
from torchtitan.data.chat.conversation import conversation
from torchtitan.data.chat.encoder import Encoder
from torchtitan.data.chat.sample import DroppedRow
from torchtitan.data.chat.show import BRACKETED, shown
from torchtitan.data.source import BadRow
from torchtitan.errors import ConfigError, DataError

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


SPACES = ["", " ", "  ", "\n", " \n ", "   "]


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "roberta"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_offsets_that_a_tokenizer_trims_do_not_move_what_is_learned(
    name, kind, trim_offsets, tmp_path
):
    """`trim_offsets` leaves the spaces of a token out of its offsets, so that it seems to begin after them."""
    plain, tok = tokenizer(name), post_processed(name, trim_offsets, kind, tmp_path)
    assert tok.encode("  a b  ") == plain.encode("  a b  ")
    for before, inside, after in itertools.product(SPACES, SPACES[:3], SPACES):
        prompt, answer = f"Say:{before}", f"{inside}four{after}"
        rows = (
            {"prompt": prompt, "completion": answer},
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]},
            {"messages": [{"role": "user", "content": "<|im_end|>" + prompt}, {"role": "assistant", "content": answer}]},
        )  # fmt: skip
        for row in rows:
            options = {"seq_len": 512}
            got = Encoder(tok, template(name), **options).encode(conversation(row, "here"), "here")
            want = sample(row, name)
            assert got.tokens.tolist() == want.tokens.tolist()
            assert got.learned.tolist() == want.learned.tolist(), (row, trim_offsets)
        found = sample(rows[0], name)
        learned_ids = found.tokens[found.learned].tolist()
        assert plain.decode(learned_ids[:-1]) == answer
        n_before = (~found.learned).sum()
        assert plain.decode(found.tokens[:n_before].tolist()).endswith(prompt)


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


def test_a_sample_is_shown_with_what_is_learned():
    text = shown(sample(TURNS), tokenizer("chatml"), BRACKETED)
    assert "<|im_start|>assistant\n⟦4<|im_end|>⟧\n<|im_start|>user\n3+3?" in text
    assert text.count("⟦") == 2


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
