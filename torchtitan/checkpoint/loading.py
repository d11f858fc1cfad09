"""What is looked at before a checkpoint is loaded: are its files whole, and do its tensors fit the run?"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from torchtitan.checkpoint.manifest import MANIFEST, DamagedError, read_manifest
from torchtitan.checkpoint.matching import TensorInfo, differences, is_rank_name, rank_name
from torchtitan.checkpoint.storage import read_metadata, tensors_in
from torchtitan.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Match:
    """A checkpoint that fits the run.

    Attributes:
        metadata: DCP's description of its shards.
        targets: the tensors to load into, by their name in the checkpoint: all global ones, and those of this
            rank that were saved for it.
    """

    metadata: "Metadata"
    targets: dict[str, Tensor]


def find_damage(path: Path, rank: int, world_size: int, *, verify_hashes: bool) -> dict[str, str]:
    """Compare this rank's share of the files with the manifest.

    Returns:
        What is wrong, by file name; empty if nothing is.

    Raises:
        CheckpointError: if ``path`` is no checkpoint, or of a newer format.
    """
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        return {MANIFEST: str(error)}
    share = sorted(manifest.files)[rank::world_size]
    damage = manifest.damage(path, share, verify_hashes=verify_hashes)
    return {name: text + _tensors_hit(path, name) for name, text in damage.items()}


def match_tensors(
    path: Path,
    rank: int,
    world_size: int,
    tensors: dict[str, Tensor],
    rank_tensors: dict[str, Tensor],
    elsewhere: Collection[str] = (),
) -> Match:
    """Pair the tensors of this run with those of the checkpoint.

    Args:
        path: of the checkpoint.
        rank: of this process.
        world_size: ranks of this run.
        tensors: this rank's sharded and replicated tensors.
        rank_tensors: tensors of this rank alone.
        elsewhere: names of tensors that other ranks have and this one has not (other pipeline stages).

    Raises:
        CheckpointError: lists everything that is missing, unexpected, or of another shape or dtype.
    """
    metadata = read_metadata(path)
    saved = tensors_in(metadata)
    own = {rank_name(rank, name): tensor for name, tensor in rank_tensors.items()}
    own_saved = {name: tensor for name, tensor in own.items() if name in saved}
    targets = tensors | own_saved
    expected = {
        name: info
        for name, info in saved.items()
        if name in targets or not (is_rank_name(name) or name in elsewhere)
    }
    lines = differences(expected, {name: TensorInfo.of(tensor) for name, tensor in targets.items()})
    if lines:
        raise CheckpointError(
            f"{len(lines)} of its tensors do not fit this run; resume with the config that it was saved "
            "with, or start afresh with resume=never:\n  " + "\n  ".join(lines)
        )
    saved_world_size = read_manifest(path).world_size
    if saved_world_size != world_size:
        log.info("%s was saved by %d ranks, %d load it", path, saved_world_size, world_size)
    if world_size > saved_world_size or len(own_saved) < len(own):
        log.warning("%s has no random state for some ranks or devices; they keep their own", path)
    return Match(metadata, targets)


def _tensors_hit(path: Path, file: str) -> str:
    """The tensors with a part in a damaged file, for the error text; empty if that cannot be told."""
    try:
        names = list(tensors_in(read_metadata(path), file))
    except CheckpointError:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (it holds {', '.join(names[:3])}{more})" if names else ""
