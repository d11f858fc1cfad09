"""The weights that a fresh run starts from: a Hugging Face folder, a model of the hub, or another run's checkpoint."""

import logging
from collections.abc import Iterator
from pathlib import Path

from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.folder import CheckpointFolder
from torchtitan.checkpoint.hugging_face.folder import (
    CONFIG,
    check_weights_present,
    family_of,
    find_folder,
    is_hub_name,
    model_differences,
    read_model,
)
from torchtitan.checkpoint.hugging_face.loading import load_weights, local_tensors
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles
from torchtitan.checkpoint.hugging_face.weights import PREFIX
from torchtitan.checkpoint.loading import find_damage
from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.checkpoint.matching import TensorInfo, differences
from torchtitan.checkpoint.storage import read_metadata, read_tensors, tensors_in
from torchtitan.config.configurable import Problem
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.models.model import Model
from torchtitan.optional import is_installed

log = logging.getLogger(__name__)


def checkpoint_in(path: Path) -> Path | None:
    """``path`` if it is a complete checkpoint, or the newest one of the run in ``path``; None if there is none."""
    if (path / MANIFEST).is_file():
        return path
    return CheckpointFolder(path / "checkpoints").latest()


def check_initial(source: str, config: Model.Config, seq_len: int) -> Iterator[Problem]:
    """Yield what keeps a model of ``config`` from starting with the weights in ``source``; a hub is not asked.

    Args:
        source: as in `Checkpointer.Config`.
        config: of the model.
        seq_len: tokens of a row; a model that does not say how long its texts may be takes it from the folder.
    """
    path = Path(source).expanduser()
    if checkpoint_in(path) is not None:
        return
    if not path.exists() and is_hub_name(source):
        if not is_installed("huggingface_hub"):
            yield Problem("", source, "needs the package 'huggingface_hub'", "run: pip install 'torchtitan[data]'")  # fmt: skip
    elif not (path / CONFIG).is_file():
        yield Problem(
            "",
            source,
            f"is neither a checkpoint (with {MANIFEST}) nor a Hugging Face folder (with {CONFIG})",
            "name one of them, a run's folder, or a model of the hub such as org/name",
        )
        return
    try:
        family_of(config)
        found = model_differences(config, path) if path.is_dir() else []
        if path.is_dir():
            check_weights_present(path)
        unknown = path.is_dir() and not found and getattr(config, "context_length", None) is None
        too_long = list(read_model(path)[1].check_seq_len(seq_len)) if unknown else []
    except (CheckpointError, ConfigError) as error:
        yield Problem("", source, "cannot be loaded", str(error))
        return
    if found:
        yield Problem("", source, "is another model", "; ".join(found))
    for problem in too_long:
        yield Problem("", source, "is for shorter rows", str(problem.within("training")))


def load_initial(source: str, config: Model.Config, model: Model, ranks: Agreement) -> None:
    """Fill ``model``, cut over any mesh, with the weights in ``source``; each rank reads its part. Collective.

    Args:
        source: a Hugging Face folder, a name on the hub, a checkpoint, or the folder of a run.
        config: of the whole model.
        model: this rank's.
        ranks: of the run.

    Raises:
        CheckpointError: if they cannot be had, or do not fit; nothing is changed then.
    """
    checkpoint = checkpoint_in(Path(source).expanduser())
    if checkpoint is not None:
        _load_checkpoint(checkpoint, model, ranks)
        return
    ranks.first(f"finding {source}", lambda: str(find_folder(source)))  # one rank downloads
    folder = Path(ranks.each(f"finding {source}", lambda: str(find_folder(source)))[ranks.rank])
    if found := ranks.first(f"loading {folder}", lambda: model_differences(config, folder)):
        raise CheckpointError(f"{folder} is another model: {'; '.join(found)}")
    load_weights(WeightFiles(folder), family_of(config).layout(config), model, ranks)


def _load_checkpoint(path: Path, model: Model, ranks: Agreement) -> None:
    """Weights alone, of a checkpoint of the same model."""
    what = f"loading {path}"
    damage = ranks.each(what, lambda: find_damage(path, ranks.rank, ranks.world_size, verify_hashes=True))  # fmt: skip
    if any(damage):
        raise CheckpointError(f"{path} is damaged: {'; '.join(t for d in damage for t in d.values())}")  # fmt: skip
    targets = {PREFIX + name: tensor.detach() for name, tensor in local_tensors(model).items()}
    elsewhere = {PREFIX + name for name in model.names_elsewhere()}

    def match() -> None:
        saved = {n: i for n, i in tensors_in(read_metadata(path)).items() if n.startswith(PREFIX)}
        saved = {n: i for n, i in saved.items() if n in targets or n not in elsewhere}
        lines = differences(saved, {n: TensorInfo.of(t) for n, t in targets.items()})
        if lines:
            raise CheckpointError(f"{len(lines)} of its tensors do not fit the model:\n  " + "\n  ".join(lines))  # fmt: skip

    ranks.each(what, match)
    ranks.each(what, lambda: read_tensors(path, read_metadata(path), targets))
    log.info("started from the weights of %s", path)
