"""Text to token ids and back, for any ``tokenizer.json``; a small tokenizer comes with the package."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan import environment
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.optional import is_installed, require

if TYPE_CHECKING:
    import tokenizers

_ASSETS = Path(__file__).parent / "assets"
BUNDLED = _ASSETS / "tokenizer.json"
"""Byte-level BPE with 4096 entries, made by ``scripts/train_tokenizer.py``."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
KNOWN_EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<|im_end|>")
_RENAMED = "\ufdd3"
"""Noncharacter of Unicode before the names of special tokens, where text has those names too."""
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
        """Token before each document; None takes the one of `tokenizer_config.json` if the tokenizer puts it before text
        by itself, and without such settings a well-known name in the file; "" means that there is none."""
        eos_token: str | None = None
        """Token after each document; None takes the one of `tokenizer_config.json`, or a well-known name in the file.
        A tokenizer must have one."""
        chat_template: str | None = None
        """How a conversation becomes text: a file with Jinja, the Jinja itself, the name of one of several in the
        tokenizer's folder, or `chatml` or `llama3`, which come with the package. None takes the folder's; that of
        the bundled tokenizer is `chatml`."""

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

            file = self._file_here()
            if file is not None:
                try:
                    _count_entries(file)
                except ValueError as error:
                    yield Problem(
                        "path",
                        self.path,
                        f"has a {file.name} that cannot be read ({error})",
                        "download or copy it again, or name another one",
                    )

        def check_fits(self, vocab_size: int) -> Iterator[Problem]:
            """Yield a problem, from the root, if it has more entries than a model of ``vocab_size``.

            One on the hub that was not downloaded yet is compared when it is built.
            """
            file = self._file_here()
            try:
                entries = 0 if file is None else _count_entries(file)
            except ValueError:  # `check` says so
                return
            if entries > vocab_size:
                yield too_many_entries(entries, vocab_size)

        def _file_here(self) -> Path | None:
            """The tokenizer file, if it is on this machine."""
            if self.path is None:
                return BUNDLED
            if Path(self.path).expanduser().exists():
                return _local_file(self.path)
            if not _HUB_NAME.fullmatch(self.path) or not is_installed("huggingface_hub"):
                return None
            hub = require("huggingface_hub", extra="data", purpose="looking for a tokenizer")
            found = hub.try_to_load_from_cache(self.path, "tokenizer.json")
            return Path(found) if isinstance(found, str) else None

        def build(self) -> "Tokenizer":
            """Load it, from disk or from the hub.

            Raises:
                ConfigError: if it cannot be found or read, or has no end-of-document token.
            """
            return Tokenizer(self)

    def __init__(self, config: Config) -> None:
        file, settings = _find(config.path)
        self._tokenizer = _load(file)
        self._renamed: tokenizers.Tokenizer | None = None
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
        self.own_prefix = self._put_before()
        """What the file itself puts before a text, which is what ``transformers`` does; a run goes by `bos_id`."""
        # The post-processor adds them, which are left out here, and may trim spaces from the offsets of tokens, which
        # then seem to begin later than they do.
        self._tokenizer.post_processor = None
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = [token.content for token in added if token.special]
        """Names of the tokens that text never encodes to."""
        names = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        self._special_name = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.named_tokens = {"eos_token": self.name(eos_id), **_named_tokens(settings)}
        """``bos_token``, ``eos_token`` and the like, as a chat template asks for them."""
        if self.bos_id is not None:
            self.named_tokens.setdefault("bos_token", self.name(self.bos_id))
        self.chat_template = _chat_template(config, file, settings)
        """Jinja, or None if the folder has none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without beginning or end.

        A text of more than 262144 characters is encoded in slices, cut at a line or word start
        where there is one: tokenizers of the GPT and Llama 3 kind give the same ids as for the
        whole.
        """
        cuts = self.cuts(text)
        ids: list[int] = []
        for start, end in pairwise(cuts):
            # Of the two ways that give the ids, the one that does not compute offsets too: a fifth of the time less.
            part = self._tokenizer.encode_batch_fast([text[start:end]], add_special_tokens=False)
            ids += part[0].ids
        return ids

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Token ids of text in which special tokens stand, and the character at which each token begins.

        The pieces are encoded as one text, as ``transformers`` does with a rendered chat template; only
        those marked True are special tokens, whatever the others look like.

        Args:
            pieces: parts of the text, and whether each is a special token's name.
        """
        looks_special = any(
            not special and self._special_name.search(piece) for piece, special in pieces
        )
        tokenizer, prefix = self._tokenizer, ""
        if looks_special:
            tokenizer, prefix = self._with_renamed_tokens(), _RENAMED
        text = "".join(prefix + piece if special else piece for piece, special in pieces)
        tokenizer.encode_special_tokens = False
        try:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        starts = [start for start, _ in encoding.offsets]
        if not prefix:
            return encoding.ids, starts
        removed = [0]  # how many characters of the text before each are those of renaming
        for character in text:
            removed.append(removed[-1] + (character == _RENAMED))
        return encoding.ids, [start - removed[start] for start in starts]

    def name(self, token_id: int) -> str:
        """The vocabulary's name of a token; one outside of it is named by its id."""
        return self._tokenizer.id_to_token(token_id) or f"<{token_id}>"

    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids."""
        whole = (self._tokenizer.to_str(), self.bos_id, self.eos_id, self.named_tokens)
        return hashlib.sha256(repr(whole).encode("utf-8")).hexdigest()

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

    def _with_renamed_tokens(self) -> "tokenizers.Tokenizer":
        """The same tokenizer with special tokens whose names no text has."""
        if self._renamed is None:
            data = json.loads(self._tokenizer.to_str())
            names = set(self.special_tokens)
            for token in data["added_tokens"]:
                if token["content"] in names:
                    token["content"] = _RENAMED + token["content"]
            model = data["model"]
            if isinstance(model["vocab"], dict):
                model["vocab"] = {
                    _RENAMED + name if name in names else name: number
                    for name, number in model["vocab"].items()
                }
            else:  # Unigram
                model["vocab"] = [
                    [_RENAMED + name if name in names else name, score]
                    for name, score in model["vocab"]
                ]
            if model.get("unk_token") in names:
                model["unk_token"] = _RENAMED + model["unk_token"]
            self._renamed = _from_text(json.dumps(data))
        return self._renamed

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_renamed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # the one setting that its pickle loses

    def _put_before(self) -> list[int]:
        alone = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        return whole[: max(0, len(whole) - len(alone))] if whole[-len(alone) :] == alone else []

    def _puts_before(self, bos_id: int | None, settings: dict[str, Any]) -> bool:
        """Whether the tokenizer puts a token that its settings name before text, as ``transformers`` has it.

        Some name one that they do not use: SmolLM2's is ``<|im_start|>``.
        """
        if settings.get("add_bos_token"):
            return True
        return self._tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id]

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
            found = self.vocab.get(named) if named else None
            return found if kind == "eos" or self._puts_before(found, settings) else None
        return next((self.vocab[name] for name in known if name in self.vocab), None)


def too_many_entries(entries: int, vocab_size: int) -> Problem:
    """What is wrong with a tokenizer of more ``entries`` than the model has rows, from the root."""
    return Problem(
        "model.vocab_size",
        vocab_size,
        f"is less than the tokenizer's {entries} entries",
        f"set model.vocab_size to at least {entries}",
    )


def _count_entries(file: Path) -> int:
    """`Tokenizer.vocab_size` of a ``tokenizer.json``, by its JSON alone; the package that builds it is not imported.

    Raises:
        ValueError: if the file holds no tokenizer.
    """
    stat = file.stat()
    return _read_entries(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=16)
def _read_entries(file: Path, changed_ns: int, size: int) -> int:
    """`_count_entries` of the file as it was at a time."""
    del changed_ns, size
    data = json.loads(file.read_text(encoding="utf-8"))
    try:
        vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
        ids = vocab if isinstance(vocab, dict) else {name: i for i, (name, _) in enumerate(vocab)}
        # The package goes by the names, and numbers new ones by itself, whatever the file says.
        new = {token["content"] for token in added} - ids.keys()
        return max(max(ids.values()) + 1, len(vocab) + len(new))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it has no vocabulary: {error!r}") from error


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
    settings = None
    for other in ("chat_template.jinja", "tokenizer_config.json"):  # all in the folder of the first
        with contextlib.suppress(
            errors.EntryNotFoundError
        ):  # many have none; offline: none was had
            settings = Path(hub.hf_hub_download(name, other))
    return file, settings and settings.with_name("tokenizer_config.json")


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
    environment.keep_tokenizers_to_one_thread()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_text(text: str) -> "tokenizers.Tokenizer":
    import tokenizers  # noqa: PLC0415 - a compiled package that no config check needs

    return tokenizers.Tokenizer.from_str(text)


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: v.get("content") if isinstance(v, dict) else v for key, v in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _chat_template(config: Tokenizer.Config, file: Path, settings: dict[str, Any]) -> str | None:
    """The text of the template that the config asks for.

    Looks in the new places (``chat_template.jinja``, ``additional_chat_templates``) and then in the old
    one (``tokenizer_config.json``).

    Raises:
        ConfigError: if it names none of them.
    """
    wanted = config.chat_template
    if wanted is not None and ("{%" in wanted or "{{" in wanted):
        return wanted
    if wanted is not None and Path(wanted).expanduser().is_file():
        return Path(wanted).expanduser().read_text(encoding="utf-8")
    old = settings.get("chat_template")
    templates = {t["name"]: t["template"] for t in old} if isinstance(old, list) else {}
    if isinstance(old, str):
        templates["default"] = old
    for found in (file.parent / "additional_chat_templates").glob("*.jinja"):
        templates[found.stem] = found.read_text(encoding="utf-8")
    new = file.with_name("chat_template.jinja")
    if config.path is not None and new.is_file():
        templates["default"] = new.read_text(encoding="utf-8")
    shipped = {path.stem: path for path in _ASSETS.glob("*.jinja")}
    name = wanted or ("chatml" if config.path is None else "default")
    if name in templates:
        return templates[name]
    if name in shipped and name != "default":
        return shipped[name].read_text(encoding="utf-8")
    if wanted is not None:
        raise ConfigError(
            f"tokenizer.chat_template={wanted!r} is no file, no Jinja, and none of "
            f"{', '.join(sorted({*templates, *shipped}))}; name a file with a template, or one of these"
        )
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
