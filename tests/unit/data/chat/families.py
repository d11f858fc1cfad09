"""Tokenizers and templates that behave like those of public families, small enough for tests."""

import datetime
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from torchtitan.data import Embedded, Tokenizer
from torchtitan.data.chat.template import ChatTemplate
from torchtitan.data.tokenizer import BUNDLED

TEMPLATES = Path(__file__).parent / "templates"
TODAY = datetime.date(2024, 7, 26)
FAMILIES = {  # name: (bos, eos, end of turn, special tokens, added tokens that are not special)
    "chatml": ("", "<|im_end|>", "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], []),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eot_id|>",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        [],
    ),
    "qwen3": (
        "",
        "<|im_end|>",
        "<|im_end|>",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    ),
    "mistral": ("<s>", "</s>", "</s>", ["<unk>", "<s>", "</s>"], []),
    "mistral_v3": ("<s>", "</s>", "</s>", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], []),
}


def _words() -> Iterator[str]:
    """Short pieces: a trainer without pre-tokenizer takes each text for one word."""
    source = Embedded.Config(split="validation").build()
    words = " ".join(source.read(index)[:4000] for index in range(10)).split()
    return (" ".join(words[i : i + 2]) for i in range(0, len(words), 2))


def _sentencepiece(special: list[str]) -> tokenizers.Tokenizer:
    tok = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*special, *(f"<0x{b:02X}>" for b in range(256))],
        limit_alphabet=120,
        show_progress=False,
    )
    tok.train_from_iterator(_words(), trainer)
    data = json.loads(tok.to_str())  # the bytes are ordinary tokens
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in special]
    tok = tokenizers.Tokenizer.from_str(json.dumps(data))
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tok


def _metaspace(special: list[str]) -> tokenizers.Tokenizer:
    tok = _sentencepiece(special)
    tok.normalizer = None
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tok


def _bytelevel(special: list[str], added: list[str]) -> tokenizers.Tokenizer:
    data = json.loads(BUNDLED.read_text(encoding="utf-8"))
    names = [t["content"] for t in data["added_tokens"]]
    vocab = {name: number for name, number in data["model"]["vocab"].items() if name not in names}
    data["model"]["vocab"] = vocab
    data["added_tokens"] = []
    for number, name in enumerate([*special, *added]):
        vocab[name] = number
        data["added_tokens"].append(
            {
                "id": number,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": name in special,
            }
        )
    for number in range(len(data["added_tokens"]), 16):
        vocab[f"<unused_{number}>"] = number
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@functools.cache
def folder(name: str) -> Path:
    """A tokenizer folder like that of a family, with its template."""
    path = Path(tempfile.mkdtemp(prefix=f"tokenizer-{name}-"))
    bos, eos, _, special, added = FAMILIES[name]
    if name == "mistral":
        tok = _sentencepiece(special)
    elif name == "mistral_v3":
        tok = _metaspace(special)
    else:
        tok = _bytelevel(special, added)
    tok.save(str(path / "tokenizer.json"))
    settings = {"eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    if bos:
        settings |= {"bos_token": bos, "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    text = (TEMPLATES / f"{name.partition('_')[0]}.jinja").read_text(encoding="utf-8")
    (path / "chat_template.jinja").write_text(text, encoding="utf-8")
    return path


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.Config(path=str(folder(name))).build()


def template(name: str, text: str | None = None) -> ChatTemplate:
    tok = tokenizer(name)
    return ChatTemplate(
        text or tok.chat_template,
        special_tokens=tok.special_tokens,
        variables=tok.named_tokens,
        today=TODAY,
    )
