import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.helpers import TOKENIZER
from torchtitan.data import Tokenizer, tokenizer
from torchtitan.data.tokenizer import BUNDLED
from torchtitan.errors import ConfigError

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]


def folder_with(tmp_path, **settings) -> str:
    shutil.copy(BUNDLED, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}",
        "日本語 한국어",
        "e\u0301",
        "\x00\x01\x7f\x85",
        " \n\t\r\n ",
        "\ufeff",
        "",
    ],
)
def test_unusual_texts_come_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_tokenizer_that_cuts_or_fills_texts_does_neither_here(tmp_path):
    """Many a tokenizer.json was saved with the settings of its last call; a prompt must not lose its beginning."""
    data = json.loads(BUNDLED.read_text(encoding="utf-8"))
    data["truncation"] = {
        "direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    data["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 4, "pad_type_id": 0, "pad_token": "<|pad|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tok, text = Tokenizer.Config(path=str(tmp_path)).build(), "def read(self, index: int) -> str:"
    for same in (tok, pickle.loads(pickle.dumps(tok))):
        assert same.encode(text) == TOKENIZER.encode(text)
        pieces = [("<|im_start|>", True), (text + "<|im_end|>", False)]
        assert same.encode_pieces(pieces) == TOKENIZER.encode_pieces(pieces)


def test_the_bundled_tokenizer():
    assert TOKENIZER.vocab_size == 4096
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (0, 1)
    assert TOKENIZER.decode([0, 1]) == "<|begin_of_text|><|end_of_text|>"
    assert all(name in TOKENIZER.vocab for name in SPECIAL)
    text = "def read(self, index: int) -> str:\n    return self.texts[index]\n"
    assert len(TOKENIZER.encode(text)) < len(text) / 2.5


@pytest.mark.parametrize("name", SPECIAL)
def test_text_that_names_a_special_token_stays_text(name):
    for tok in (TOKENIZER, pickle.loads(pickle.dumps(TOKENIZER))):
        ids = tok.encode(f"a{name}b")
        assert len(ids) > 3
        assert min(ids) >= 16  # the special tokens are below
        assert tok.decode(ids) == f"a{name}b"


@pytest.mark.parametrize("cut", ["words and lines\n", "wordsandwords", "a b\tc\n\n\n  d "])
def test_a_long_text_is_encoded_in_slices(cut, monkeypatch):
    text = cut * (400_000 // len(cut))
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    if " " in cut:
        monkeypatch.setattr(tokenizer, "_SLICE_CHARACTERS", len(text))
        assert TOKENIZER.encode(text) == ids


def test_bos_and_eos_of_tokenizer_config(tmp_path):
    named = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    path = folder_with(tmp_path, **named, add_bos_token=True)
    tok = Tokenizer.Config(path=path).build()
    assert (tok.bos_id, tok.eos_id) == (3, 4)
    tok = Tokenizer.Config(path=path, bos_token="", eos_token="<|pad|>").build()
    assert (tok.bos_id, tok.eos_id) == (None, 2)


def test_a_beginning_token_that_is_named_is_used_if_the_tokenizer_itself_puts_it_there(tmp_path):
    path = folder_with(tmp_path, bos_token="<|im_start|>")
    tok = Tokenizer.Config(path=path).build()
    assert (tok.bos_id, tok.own_prefix) == (None, [])
    assert Tokenizer.Config(path=path, bos_token="<|im_start|>").build().bos_id == 3
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [3], "tokens": ["<|im_start|>"]}},
    }  # fmt: skip
    file.write_text(json.dumps(data), encoding="utf-8")
    tok = Tokenizer.Config(path=path).build()
    assert (tok.bos_id, tok.own_prefix) == (3, [3])
    assert 3 not in tok.encode("a")


@pytest.mark.parametrize("settings", [{"bos_token": None}, {"add_bos_token": False}])
def test_a_tokenizer_without_bos(tmp_path, settings):
    tok = Tokenizer.Config(path=folder_with(tmp_path, **settings)).build()
    assert (tok.bos_id, tok.eos_id) == (None, 1)


def test_no_end_of_document_token_names_the_field(tmp_path):
    path = folder_with(tmp_path, eos_token=None)
    with pytest.raises(
        ConfigError,
        match=r"names no end-of-document token .* vocabulary of 4096\); set tokenizer.eos_token",
    ):
        Tokenizer.Config(path=path).build()


def test_a_token_that_is_not_in_the_vocabulary():
    expected = r"tokenizer.eos_token='</end>' is not among the 4096 tokens"
    with pytest.raises(ConfigError, match=expected):
        Tokenizer.Config(eos_token="</end>").build()


def test_files_that_are_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=r"tokenizer.json is not a tokenizer that the package tokenizers can read \(",
    ):
        Tokenizer.Config(path=str(tmp_path)).build()
    folder_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"tokenizer_config.json is not valid JSON \(.*\); mend or remove it"
    ):
        Tokenizer.Config(path=str(tmp_path)).build()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "the folder has no tokenizer.json"),
        ("folder/tokenizer.json", "does not exist"),
        ("nowhere/at/all", "does not exist"),
    ],
)
def test_paths_that_are_missing(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    config = Tokenizer.Config(path=str(tmp_path / name))
    (problem,) = config.check()
    assert (problem.path, problem.reason) == ("path", reason)
    with pytest.raises(
        ConfigError,
        match=r"there is no tokenizer.json; name a tokenizer.json, its folder, or a hub name",
    ):
        config.build()


UNIGRAM = [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]


@pytest.mark.parametrize(
    ("vocab", "added", "entries"),
    [
        ({"a": 0, "b": 1}, [], 2),
        ({"a": 0, "b": 6}, [], 7),  # unused ids count
        ({"a": 0, "</s>": 1}, ["</s>", "<pad>", "<x>"], 4),
        ({"a": 0, "b": 6}, ["b", "<pad>"], 7),
        ({"a": 0, "b": 6}, ["<pad>"], 7),
        (UNIGRAM, [], 3),
        (UNIGRAM, ["</s>"], 4),
    ],
)
def test_the_number_of_entries_is_known_without_the_package(tmp_path, vocab, added, entries):
    words = {"type": "WordLevel", "unk_token": "a"}
    kind = {"type": "Unigram", "unk_id": 0} if vocab is UNIGRAM else words
    model = {**kind, "vocab": vocab}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = [
        {**flags, "special": True, "id": 2 + i, "content": content}
        for i, content in enumerate(added)
    ]
    text = json.dumps({"version": "1.0", "model": model, "added_tokens": whole})
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    config = Tokenizer.Config(path=str(tmp_path), eos_token="a")
    assert list(config.check()) == list(config.check_fits(entries)) == []
    (problem,) = config.check_fits(entries - 1)
    assert str(problem) == (
        f"model.vocab_size={entries - 1}: is less than the tokenizer's {entries} entries; "
        f"set model.vocab_size to at least {entries}"
    )
    assert config.build().vocab_size == entries


def test_counting_entries_imports_nothing_slow():
    program = (
        "import sys\n"
        "from torchtitan.data import Tokenizer\n"
        "assert list(Tokenizer.Config().check_fits(4095))\n"
        "assert 'tokenizers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("{}", "it has no vocabulary: KeyError('model')"),
        ('{"model": {"vocab": {}}}', "it has no vocabulary"),
    ],
)
def test_a_file_without_a_vocabulary_is_found_by_the_check(tmp_path, text, reason):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    config = Tokenizer.Config(path=str(tmp_path))
    (problem,) = config.check()
    assert str(problem).startswith(f"path={tmp_path}: has a tokenizer.json that cannot be read (")
    assert reason in str(problem)
    assert list(config.check_fits(1)) == []


def test_good_paths_have_no_problem(tmp_path):
    folder = folder_with(tmp_path)
    for path in (None, folder, f"{folder}/tokenizer.json", "gpt2", "org/name"):
        assert not list(Tokenizer.Config(path=path).check())


def test_a_hub_name_is_found_in_the_hub_cache_when_offline(tmp_path):
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    shutil.copy(BUNDLED, snapshot / "tokenizer.json")
    (tmp_path / "hub/models--org--name/refs").mkdir()
    (tmp_path / "hub/models--org--name/refs/main").write_text("abc", encoding="utf-8")
    program = (
        "from torchtitan.data import Tokenizer\n"
        "assert Tokenizer.Config(path='org/name').build().vocab_size == 4096\n"
        "(problem,) = Tokenizer.Config(path='org/name').check_fits(9)\n"
        "assert '4096 entries' in str(problem)\n"
        "assert list(Tokenizer.Config(path='org/other').check_fits(9)) == []\n"
        "try: Tokenizer.Config(path='org/other').build()\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(
        "tokenizer.path=org/other: cannot get tokenizer.json from the hub ("
    )
    assert "HF_HUB_OFFLINE, or name a local path" in result.stdout
