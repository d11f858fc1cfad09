"""``manifest.json``: what a complete checkpoint consists of. A folder without one is not a checkpoint."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.files import FileRecord, HashedFile, damage_of
from torchtitan.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"


class DamagedError(CheckpointError):
    """Files of a checkpoint are not what was written: an older checkpoint may be used instead."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one checkpoint.

    Attributes:
        step: optimizer steps taken.
        torch_version: of the run that saved it.
        world_size: ranks of the run that saved it.
        files: every other file of the folder, by name.
        tensors: every tensor stored, by name: its dtype and global shape, ``float32 [300, 100]``.
    """

    step: int
    torch_version: str
    world_size: int
    files: dict[str, FileRecord]
    tensors: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write it, durably, as the last file of ``folder``."""
        body = {"format": FORMAT, **asdict(self)}
        with HashedFile(folder / MANIFEST) as file:
            file.write(json.dumps({"sha256": _digest(body), **body}, indent=1).encode())

    def damage(self, folder: Path, names: Iterable[str], *, verify_hashes: bool) -> dict[str, str]:
        """Which of the files ``names`` are not as recorded: name to what is wrong."""
        found = {
            name: damage_of(folder / name, self.files[name], verify_hash=verify_hashes)
            for name in names
        }
        return {name: damage for name, damage in found.items() if damage is not None}


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of ``folder``.

    Raises:
        DamagedError: if it is not what was written.
        CheckpointError: if there is none, or a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        recorded = body.pop("sha256")
        if recorded != _digest(body):
            raise DamagedError(f"{path} is damaged: its content does not match its own sha256")
        if body.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path} has a format other than {FORMAT}: a newer torchtitan wrote it; load it with that version"
            )
        return Manifest(
            step=body["step"],
            torch_version=body["torch_version"],
            world_size=body["world_size"],
            files={name: FileRecord(**record) for name, record in body["files"].items()},
            tensors=dict(body["tensors"]),
        )
    except FileNotFoundError:
        raise CheckpointError(_not_a_checkpoint(folder)) from None
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged: {error!r}") from error


def _not_a_checkpoint(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no checkpoint folder {folder}; pass an existing one, or resume=latest or never"
    inside = sorted(path.parent for path in folder.glob(f"**/{MANIFEST}"))
    hint = (
        f"it holds {', '.join(map(str, inside))}: pass one of them"
        if inside
        else "pass a complete one"
    )
    return f"{folder} is not a complete checkpoint: it has no {MANIFEST}; {hint}"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
