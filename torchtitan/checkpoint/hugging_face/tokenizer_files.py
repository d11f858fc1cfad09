"""What an exported folder has beside weights and config: tokenizer, chat template, and when generation ends."""

import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.hugging_face.folder import TOKENIZER_FILES
from torchtitan.data.chat.template import end_of_turn_id
from torchtitan.data.tokenizer import KNOWN_BOS, KNOWN_EOS, Tokenizer
from torchtitan.errors import CheckpointError, ConfigError

TEMPLATE = "chat_template.jinja"
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>", "<|end_of_turn|>", "</s>", "<|return|>",
)  # fmt: skip
"""Tokens that chat templates end a turn with, for those that end some turns with another one than an answer."""


def write_tokenizer_files(source: Path, to: Path, chat_template: str | None = None) -> None:
    """Copy the tokenizer of ``source`` (a folder, or a ``tokenizer.json``) and write the chat template where loaders look.

    Args:
        source: the tokenizer's files.
        to: the folder to be made.
        chat_template: text of the template that the model was trained with; None for the tokenizer's own.

    Raises:
        CheckpointError: if there is no tokenizer, or its settings are no JSON.
    """
    folder = source if source.is_dir() else source.parent
    if source.is_file():
        shutil.copyfile(source, to / "tokenizer.json")
    patterns = TOKENIZER_FILES if source.is_dir() else TOKENIZER_FILES[1:3]
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        target = to / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    if not any((to / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise CheckpointError(f"{source} has no tokenizer.json; name the folder of a tokenizer")
    settings = _read(to / "tokenizer_config.json")
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    _move_template(to, settings)
    if chat_template is not None:
        (to / TEMPLATE).write_text(chat_template, encoding="utf-8")
    if not settings.get("eos_token"):
        _name_special_tokens(to, settings)
    _write(to / "tokenizer_config.json", settings)


def write_generation_config(folder: Path, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write ``generation_config.json`` and return it: generation ends at the end of a document, and of a turn.

    Args:
        folder: with the tokenizer's files.
        base: the settings of the model that this one was made from.
    """
    ids = token_ids(folder)
    settings = _read(folder / "tokenizer_config.json")
    config = dict(base or {})
    known = config.get("eos_token_id")
    ends = list(known) if isinstance(known, list) else [known] if isinstance(known, int) else []
    template = folder / TEMPLATE
    text = template.read_text(encoding="utf-8") if template.is_file() else ""
    names = [_name(settings.get("eos_token")), *(name for name in _TURN_ENDS if name in text)]
    ends += [ids[name] for name in names if name in ids]
    if text and (turn_end := _end_of_turn(folder)) is not None:
        ends.append(turn_end)
    if ends:
        config["eos_token_id"] = list(dict.fromkeys(ends))
    for kind in ("bos", "pad"):
        name = _name(settings.get(f"{kind}_token"))
        if name in ids:
            config.setdefault(f"{kind}_token_id", ids[name])
    _write(folder / "generation_config.json", config)
    return config


def token_ids(folder: Path) -> dict[str, int]:
    """The vocabulary's special tokens, and for a plain vocabulary all of them, by name."""
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def _end_of_turn(folder: Path) -> int | None:
    """The token with which the template really ends an answer, whatever its name is."""
    try:
        tokenizer = Tokenizer.Config(path=str(folder)).build()
    except ConfigError:
        return None  # there is only a tokenizer.model, or it has no end of a document
    return end_of_turn_id(tokenizer)


def _move_template(folder: Path, settings: dict[str, Any]) -> None:
    """From ``tokenizer_config.json`` (the old place, where it wins over nothing) to files of their own."""
    template = settings.pop("chat_template", None)
    named = {"default": template} if isinstance(template, str) else {}
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
    for name, text in named.items():
        path = folder / (TEMPLATE if name == "default" else f"additional_chat_templates/{name}.jinja")  # fmt: skip
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _name_special_tokens(folder: Path, settings: dict[str, Any]) -> None:
    """Say which tokens stand around a document, where only a ``tokenizer.json`` is there."""
    ids = token_ids(folder)
    for key, names in (("bos_token", KNOWN_BOS), ("eos_token", KNOWN_EOS)):
        found = next((name for name in names if name in ids), None)
        if found is not None and not settings.get(key):
            settings[key] = found
            if key == "bos_token":
                _put_before_text(folder / "tokenizer.json", found, ids[found])


def _put_before_text(file: Path, name: str, token_id: int) -> None:
    """Have a ``tokenizer.json`` that adds nothing to text put a token before it, as it is before each document in training."""
    data = _read(file)
    if data.get("post_processor") is not None:
        return
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in "AB")
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }
    _write(file, data)


def _name(token: Any) -> str:
    """A token's text; settings have it plain, or in an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); mend or remove it") from error


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
