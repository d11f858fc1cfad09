"""``torchtitan export``: from a checkpoint to a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.component import generation_of
from torchtitan.checkpoint.hugging_face.export import Target, export
from torchtitan.checkpoint.hugging_face.folder import find_tokenizer
from torchtitan.checkpoint.hugging_face.weights import SavedWeights
from torchtitan.checkpoint.initial import checkpoint_in
from torchtitan.checkpoint.loading import find_damage
from torchtitan.checkpoint.manifest import STATE
from torchtitan.cli.arguments import Arguments
from torchtitan.cli.output import say
from torchtitan.config.serialize import from_dict
from torchtitan.data.tokenizer import BUNDLED, Tokenizer
from torchtitan.errors import CheckpointError
from torchtitan.models.model import Model

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan export ...`` and return its exit code."""
    parser = Arguments(
        "export",
        "Write a checkpoint as a folder that transformers and vLLM load, read it back and compare. Needs no GPU, and memory "
        "for one file of weights.",
    )
    parser.add_argument("checkpoint", type=Path, help="a step-... folder, or a run's folder: its newest")  # fmt: skip
    parser.add_argument("to", type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (bfloat16)")  # fmt: skip
    parser.add_argument("--tokenizer", help="folder, tokenizer.json or name on the hub (default: the run's)")  # fmt: skip
    parser.add_argument("--max-shard-gib", type=float, default=5.0, help="size of a file (5)")
    parser.add_argument("--allow-loss", action="store_true", help="leave out what the format has no place for")  # fmt: skip
    arguments = parser.parse(argv)
    if arguments is None:
        return 0
    checkpoint = _whole(arguments.checkpoint)
    config = json.loads((checkpoint / STATE).read_bytes())["config"]
    settings = config.get("tokenizer") or {}
    tokenizer = arguments.tokenizer or settings.get("path")
    template = Tokenizer.Config(path=tokenizer, chat_template=settings.get("chat_template"))
    initial = (config.get("checkpoint") or {}).get("initial_load", "")
    target = Target(
        folder=arguments.to,
        dtype=arguments.dtype,
        tokenizer=BUNDLED if tokenizer is None else find_tokenizer(tokenizer),
        chat_template=template.build().chat_template,
        generation=generation_of(initial) if initial else {},
        max_shard_bytes=int(arguments.max_shard_gib * 2**30),
        allow_loss=arguments.allow_loss,
    )
    verdict = export(SavedWeights(checkpoint), _model_config(config), target, Agreement())
    say(f"exported {verdict}")
    return 0


def _whole(path: Path) -> Path:
    """The checkpoint that ``path`` means.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    checkpoint = checkpoint_in(path.expanduser())
    if checkpoint is None:
        raise CheckpointError(f"{path} is no checkpoint and no run's folder with one; name a step-... folder")  # fmt: skip
    if damage := find_damage(checkpoint, 0, 1, verify_hashes=True):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(damage.values())}; restore it from a copy")  # fmt: skip
    return checkpoint


def _model_config(config: dict[str, Any]) -> Model.Config:
    model = from_dict(config["model"])
    if not isinstance(model, Model.Config):
        raise CheckpointError(f"the checkpoint's model is a {type(model).__qualname__}, no model")
    return model
