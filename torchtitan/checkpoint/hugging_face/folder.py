"""A model folder in Hugging Face's format, by path or by name on the hub; nothing in it is ever run."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.hugging_face.weight_files import INDEX, PICKLES, SINGLE, no_weights
from torchtitan.config.differences import differences
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.models.family import Family, find_family
from torchtitan.models.model import Model
from torchtitan.optional import require

log = logging.getLogger(__name__)

CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_WANTED = (CONFIG, "generation_config.json", "model*.safetensors", INDEX, *TOKENIZER_FILES)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` is ``org/name``, and no folder of this machine."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).expanduser().exists()


def find_folder(name: str, *, revision: str | None = None) -> Path:
    """The folder ``name``, or the model of that name on the hub, downloaded at the first use.

    The hub is the one of ``HF_ENDPOINT``, the store ``HF_HOME``; ``HF_TOKEN`` opens private models, and with
    ``HF_HUB_OFFLINE=1`` only what is in the store is found.

    Raises:
        CheckpointError: if it cannot be had.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if not is_hub_name(name):
        raise CheckpointError(f"{name} is no folder; name one that exists, or a model of the hub such as org/name")  # fmt: skip
    return download(name, revision=revision)


def find_tokenizer(name: str) -> Path:
    """A tokenizer's folder or file, or that of a model of the hub, downloaded at the first use.

    Raises:
        CheckpointError: if it cannot be had.
    """
    local = Path(name).expanduser()
    return download(name, weights=False) if is_hub_name(name) else local


def download(
    name: str, *, revision: str | None = None, to: Path | None = None, weights: bool = True
) -> Path:
    """Fetch config, tokenizer and safetensors of a model of the hub; no pickles and no code.

    Args:
        name: ``org/name``.
        revision: branch, tag or commit; None for the main branch.
        to: folder to put the files into; None for the hub's own store.
        weights: False leaves them out.

    Raises:
        CheckpointError: if it is not there, not allowed, offline and not in the store, or has pickles only.
    """
    if Path(name).expanduser().exists():
        raise CheckpointError(f"{name} is on this machine already; use it as it is, or name a model of the hub")  # fmt: skip
    hub = require("huggingface_hub", extra="data", purpose="downloading a model")
    try:
        folder = Path(
            hub.snapshot_download(
                name,
                revision=revision,
                local_dir=to,
                allow_patterns=list(_WANTED if weights else TOKENIZER_FILES),
            )
        )
    except Exception as error:  # of many libraries: network, login, disk
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise CheckpointError(
            f"{name}: cannot get the model from the hub ({text}); check the name, the network, HF_TOKEN and "
            "HF_HUB_OFFLINE, or name a local folder"
        ) from error
    if weights and not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        raise CheckpointError(
            f"{name}: the repository has no {SINGLE} and no {INDEX} (weights as pickles, {', '.join(PICKLES)}, are not fetched: "
            "they can run any program); choose a revision with safetensors, often refs/pr/1 by the hub's converter"
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder.

    Raises:
        CheckpointError: if there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}; name a folder that transformers can load") from None  # fmt: skip
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend it or download it again") from error  # fmt: skip
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise CheckpointError(f"{path} names no model_type; it is no config of a model")
    return found


def read_model(folder: Path) -> tuple[Family, Model.Config]:
    """The family and config of the model in ``folder``.

    Raises:
        CheckpointError: if there is no readable ``config.json``.
        ConfigError: if its family is not known, or has something that is not supported.
    """
    hf = read_config(folder)
    family = find_family(hf["model_type"])
    return family, family.from_hf(hf)


def family_of(config: Model.Config) -> Family:
    """The family under which a model is exchanged.

    Raises:
        ConfigError: if its config names none.
    """
    model_type = getattr(config, "hf_model_type", "")
    if not model_type:
        raise ConfigError(
            "model.hf_model_type is empty: the model has no Hugging Face format; set it to a family such as llama"
        )
    return find_family(model_type)


def model_differences(config: Model.Config, folder: Path) -> list[str]:
    """In what the model in ``folder`` computes something else than ``config``; settings of training do not count.

    Raises:
        CheckpointError: if there is no readable ``config.json``.
        ConfigError: if one of the two cannot be expressed.
    """
    family = family_of(config)
    hf = read_config(folder)
    if hf["model_type"] != family.model_type:
        return [f"model.hf_model_type={family.model_type!r}, the folder has {hf['model_type']!r}"]
    ours, theirs = (family.from_hf(family.to_hf(c)) for c in (config, family.from_hf(hf)))
    return [
        f"model.{d.path}={d.old!r}, the folder has {d.new!r}"
        for d in differences(ours, theirs)
        if d.changes_mathematics and d.path != "init_std"
    ]


def check_weights_present(folder: Path) -> None:
    """See that there are safetensors.

    Raises:
        CheckpointError: if not; of pickles it says what to do.
    """
    if not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        raise CheckpointError(no_weights(folder))
