"""The export of a training run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.export import Dtype, Target, Verdict, export
from torchtitan.checkpoint.hugging_face.folder import CONFIG, family_of, find_folder, find_tokenizer
from torchtitan.checkpoint.hugging_face.weights import LiveWeights
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.data.tokenizer import BUNDLED
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.models.model import Model


class HuggingFaceExport(Configurable):
    """Writes the model of a run as a Hugging Face folder."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What the folder is to be like; it is ``<run folder>/hugging_face``."""

        dtype: Dtype = "bfloat16"
        """Type of the weights."""
        max_shard_gib: float = 5.0
        """Size of a file; a larger tensor has one of its own."""
        allow_loss: bool = False
        """Leave out what the format has no place for (biases that balance experts) instead of refusing."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.max_shard_gib <= 0:
                yield Problem("max_shard_gib", self.max_shard_gib, "is not positive", "set 5 or so")

        def check_model(self, model: Model.Config) -> Iterator[Problem]:
            """Yield a problem if ``model`` cannot be exported."""
            try:
                family_of(model).to_hf(model)
            except ConfigError as error:
                yield Problem("", "set", "the model cannot be exported", str(error))

        def build(self, *, folder: Path) -> "HuggingFaceExport":
            """Make the exporter of the run in ``folder``."""
            return HuggingFaceExport(self, folder)

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder / "hugging_face"

    def export(
        self,
        config: Model.Config,
        model: Model,
        tokenizer: str | None,
        chat_template: str | None,
        initial: str,
        ranks: Agreement,
    ) -> Verdict:
        """Write the folder, without changing ``model``. Collective.

        Args:
            config: of the model.
            model: this rank's part of it.
            tokenizer: `Tokenizer.Config.path`.
            chat_template: the text of it; None for the tokenizer's own.
            initial: `Checkpointer.Config.initial_load`: settings of generation come from there.
            ranks: of the run.

        Raises:
            CheckpointError: see `torchtitan.checkpoint.hugging_face.export.export`.
        """
        target = Target(
            folder=self.folder,
            dtype=self.config.dtype,
            tokenizer=BUNDLED if tokenizer is None else find_tokenizer(tokenizer),
            chat_template=chat_template,
            generation=generation_of(initial) if initial else {},
            max_shard_bytes=int(self.config.max_shard_gib * 2**30),
            allow_loss=self.config.allow_loss,
        )
        return export(LiveWeights(model), config, target, ranks)


def generation_of(source: str) -> dict[str, Any]:
    """``generation_config.json`` of a Hugging Face folder or model of the hub; empty if there is none.

    Raises:
        CheckpointError: if it cannot be read.
    """
    local = Path(source).expanduser()
    if local.is_dir() and not (local / CONFIG).is_file():
        return {}
    path = find_folder(source) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend or remove it") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object; mend or remove it")
    return found
