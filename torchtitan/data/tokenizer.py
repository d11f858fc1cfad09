"""Text to token ids and back, for any ``tokenizer.json``; a small tokenizer comes with the package."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.optional import is_installed, require

if TYPE_CHECKING:
    import tokenizers

BUNDLED = Path(__file__).parent / "assets" / "tokenizer.json"
"""Byte-level BPE with 4096 entries, made by ``scripts/train_tokenizer.py``."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
KNOWN_EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<|im_end|>")
_SLICE_CHARACTERS = 1 << 18  # one slice at a time takes 60 MB; a 10 MB text in one go takes 1.4 GB
_SAFE_CUT = re.compile(
    r"\n(?=\S)|\S(?=[ ]\S)"
)  # before a line or a word: no pre-tokenizer joins across


class Tokenizer(Configurable):
    """Encodes text without special tokens; text that looks like a special token stays ordinary text."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Which tokenizer, and which of its tokens stand around a document."""

        path: str | None = None
        """A `tokenizer.json`, a folder that has one, or a name on the Hugging Face Hub. None is the bundled
        byte-level BPE with 4096 entries."""
        bos_token: str | None = None
        """Token before each document; None takes it from `tokenizer_config.json` or a well-known name in the
        file, "" means that there is none."""
        eos_token: str | None = None
        """Token after each document; None finds it as for `bos_token`. A tokenizer must have one."""

        def check(self) -> Iterator[Problem]:
            """A local path must exist; a hub name needs the package that downloads it."""
            if self.path is None:
                return
            if Path(self.path).expanduser().exists():
                if _local_file(self.path) is None:
                    yield Problem(
                        "path",
                        self.path,
                        "the folder has no tokenizer.json",
                        "name a folder or file that has one",
                    )
            elif not _HUB_NAME.fullmatch(self.path) or self.path.endswith(".json"):
                yield Problem(
                    "path",
                    self.path,
                    "does not exist",
                    "name a tokenizer.json, its folder, or a hub name such as gpt2 or org/name",
                )
            elif not is_installed("huggingface_hub"):
                yield Problem(
                    "path",
                    self.path,
                    "is no local path, and the package that downloads from the hub is not installed",
                    "run: pip install 'torchtitan[data]', or name a local path",
                )

        def build(self) -> "Tokenizer":
            """Load it, from disk or from the hub.

            Raises:
                ConfigError: if it cannot be found or read, or has no end-of-document token.
            """
            return Tokenizer(self)

    def __init__(self, config: Config) -> None:
        file, settings = _find(config.path)
        self._tokenizer = _load(file)
        self.vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab.values()) + 1
        """Number of ids, with the unused ones below the largest."""
        self.bos_id = self._special("bos", config.bos_token, settings, KNOWN_BOS)
        eos_id = self._special("eos", config.eos_token, settings, KNOWN_EOS)
        if eos_id is None:
            raise ConfigError(
                f"the tokenizer {config.path!r} names no end-of-document token (no eos_token in "
                f"tokenizer_config.json, none of {', '.join(KNOWN_EOS)} in its vocabulary of {self.vocab_size}); "
                "set tokenizer.eos_token to the token that ends a document"
            )
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without beginning or end.

        A text of more than 262144 characters is encoded in slices, cut at a line or word start
        where there is one: tokenizers of the GPT and Llama 3 kind give the same ids as for the
        whole.
        """
        cuts = self.cuts(text)
        ids: list[int] = []
        for start, end in pairwise(cuts):
            ids += self._tokenizer.encode(text[start:end], add_special_tokens=False).ids
        return ids

    def cuts(self, text: str) -> list[int]:
        """Where the slices of ``text`` begin, and its length; each slice is encoded by itself."""
        cuts = [0]
        while len(text) - cuts[-1] > _SLICE_CHARACTERS:
            end = cuts[-1] + _SLICE_CHARACTERS
            safe = [match.end() for match in _SAFE_CUT.finditer(text, end - 1024, end)]
            cuts.append(safe[-1] if safe else end)
        return [*cuts, len(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are shown by their names."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # the one setting that its pickle loses

    def _special(
        self, kind: str, configured: str | None, settings: dict[str, Any], known: Sequence[str]
    ) -> int | None:
        if configured:
            if configured not in self.vocab:
                raise ConfigError(
                    f"tokenizer.{kind}_token={configured!r} is not among the {self.vocab_size} tokens of the "
                    f"vocabulary; set tokenizer.{kind}_token to one that is"
                )
            return self.vocab[configured]
        if configured == "" or (settings.get(f"add_{kind}_token") is False and kind == "bos"):
            return None
        if f"{kind}_token" in settings:
            named = settings[f"{kind}_token"]
            named = named.get("content") if isinstance(named, dict) else named
            return self.vocab.get(named) if named else None
        return next((self.vocab[name] for name in known if name in self.vocab), None)


def _find(path: str | None) -> tuple[Path, dict[str, Any]]:
    """The tokenizer file, and what ``tokenizer_config.json`` beside it says."""
    file = BUNDLED if path is None else _local_file(path)
    if file is not None:
        settings_file: Path | None = file.with_name("tokenizer_config.json")
    elif path is not None and _HUB_NAME.fullmatch(path) and not Path(path).exists():
        file, settings_file = _download(path)
    else:
        raise ConfigError(
            f"tokenizer.path={path}: there is no tokenizer.json; name a tokenizer.json, its folder, or a hub name"
        )
    if settings_file is None or not settings_file.is_file():
        return file, {}
    try:
        return file, json.loads(settings_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{settings_file} is not valid JSON ({error}); mend or remove it"
        ) from error


def _local_file(path: str) -> Path | None:
    local = Path(path).expanduser()
    file = local / "tokenizer.json" if local.is_dir() else local
    return file if file.is_file() else None


def _download(name: str) -> tuple[Path, Path | None]:
    hub = require("huggingface_hub", extra="data", purpose="downloading a tokenizer")
    try:
        file = Path(hub.hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # of many libraries: network, login, disk
        raise ConfigError(
            f"tokenizer.path={name}: cannot get tokenizer.json from the hub ({_first_line(error)}); check the name, "
            "the network and HF_HUB_OFFLINE, or name a local path"
        ) from error
    errors = require("huggingface_hub.errors", extra="data", purpose="downloading a tokenizer")
    try:
        return file, Path(hub.hf_hub_download(name, "tokenizer_config.json"))
    except errors.EntryNotFoundError:  # many have none; offline: none was downloaded
        return file, None


def _load(file: Path) -> "tokenizers.Tokenizer":
    import tokenizers  # noqa: PLC0415 - a compiled package that no config check needs

    try:
        tokenizer = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ConfigError(
            f"{file} is not a tokenizer that the package tokenizers can read ({_first_line(error)}); "
            "set tokenizer.path to another one"
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
