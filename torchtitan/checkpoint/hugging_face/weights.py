"""Where weights come from when they leave: a live model on any mesh, or a checkpoint on disk."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchtitan import torch_api
from torchtitan.checkpoint.hugging_face.loading import local_tensors
from torchtitan.checkpoint.storage import read_metadata, read_tensors, tensors_in
from torchtitan.errors import CheckpointError
from torchtitan.models.mapping import Layout
from torchtitan.models.model import Model

PREFIX = "policy.model."
"""Of the names of the trained model's tensors in a checkpoint."""


class Weights(ABC):
    """Parameters and buffers by name, one whole tensor at a time; reading never changes them."""

    @abstractmethod
    def names(self) -> list[str]:
        """Those that this rank can read."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The whole tensor. All ranks that have the name must read it, in the same order."""

    @abstractmethod
    def held(self, name: str) -> Tensor:
        """The tensor as this rank holds it: a DTensor if it is sharded."""


class LiveWeights(Weights):
    """The weights of a model in training."""

    def __init__(self, model: Model) -> None:
        self._tensors = local_tensors(model)

    def names(self) -> list[str]:
        """See `Weights.names`."""
        return list(self._tensors)

    def read(self, name: str) -> Tensor:
        """See `Weights.read`: gathered over the ranks that share it."""
        tensor = self.held(name)
        return tensor.full_tensor() if isinstance(tensor, torch_api.DTensor) else tensor

    def held(self, name: str) -> Tensor:
        """See `Weights.held`."""
        return self._tensors[name].detach()


class SavedWeights(Weights):
    """The weights in a checkpoint's folder; only what is read is in memory.

    Raises:
        CheckpointError: if the folder is no checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        self._metadata = read_metadata(checkpoint)
        saved = tensors_in(self._metadata).items()
        self._infos = {n.removeprefix(PREFIX): info for n, info in saved if n.startswith(PREFIX)}
        if not self._infos:
            raise CheckpointError(f"{checkpoint} has no tensors named {PREFIX}...; name a checkpoint of a model")  # fmt: skip

    def names(self) -> list[str]:
        """See `Weights.names`."""
        return list(self._infos)

    def read(self, name: str) -> Tensor:
        """See `Weights.read`."""
        info = self._infos[name]
        tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="cpu")
        read_tensors(self._folder, self._metadata, {PREFIX + name: tensor})
        return tensor

    def held(self, name: str) -> Tensor:
        """See `Weights.held`."""
        return self.read(name)


def hf_tensors(
    weights: Weights, layout: Layout, names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors ``names`` of a Hugging Face folder, whole, one after the other.

    Each parameter is read once where the names follow the layout's order. On a mesh it is collective.

    Args:
        weights: to read from.
        layout: of the model.
        names: theirs.
    """
    known: dict[str, Tensor] = {}
    for name in names:
        pieces = layout.by_theirs[name]
        needed = {piece.ours for piece in pieces}
        known = {ours: known[ours] if ours in known else weights.read(ours) for ours in sorted(needed)}  # fmt: skip
        first = pieces[0]
        if len(pieces) == 1:
            yield name, first.to_theirs(known[first.ours])
            continue
        whole = torch.empty(first.their_shape, dtype=known[first.ours].dtype, device=known[first.ours].device)  # fmt: skip
        for piece in pieces:
            whole[piece.their_box] = piece.to_theirs(known[piece.ours])
        yield name, whole
