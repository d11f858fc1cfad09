"""From a Hugging Face folder into a model: each rank reads the parts of the tensors that it holds."""

import difflib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan import torch_api
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles
from torchtitan.checkpoint.matching import TensorInfo
from torchtitan.errors import CheckpointError
from torchtitan.models.layers.init import held_indices
from torchtitan.models.mapping import Box, Layout
from torchtitan.models.model import Model

log = logging.getLogger(__name__)

_READABLE = ("float64", "float32", "float16", "bfloat16")
_MAX_LINES = 100  # of an error text
_MAX_HINTS = 50  # looking for near names is quadratic
_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Held:
    """A part of a parameter that this rank holds, without gaps.

    Attributes:
        box: the part, in the whole parameter.
        at: the same part, in this rank's tensor.
    """

    box: Box
    at: Box


def load_weights(files: WeightFiles, layout: Layout, model: Model, ranks: Agreement) -> None:
    """Fill ``model`` (plain, or cut over any mesh) from ``files``. Collective.

    Nothing is changed unless every tensor has its place, shape and a type of weights.

    Args:
        files: of the folder.
        layout: for the whole model.
        model: this rank's; its tensors are filled in place and keep their type.
        ranks: those of the run.

    Raises:
        CheckpointError: lists all tensors that do not fit; on all ranks alike.
    """
    what = f"loading {files.folder}"
    ranks.each(what, lambda: check_tensors(files, layout))
    ranks.first(what, lambda: check_aliases(files, layout))
    ranks.each(what, lambda: _fill(files, layout, model))
    log.info("loaded %d tensors from %s", len(layout.by_theirs), files.folder)


def check_tensors(files: WeightFiles, layout: Layout) -> None:
    """See that the tensors of a folder are those of the layout.

    Raises:
        CheckpointError: with a line for each tensor that is missing, unknown, or of a wrong shape or type.
    """
    stored = {name: s.info for name, s in files.stored.items() if not layout.is_dropped(name)}
    lines = list(_misfits(stored, layout))
    if lines:
        more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        raise CheckpointError(
            f"{len(lines)} tensors do not fit the model; choose the model of this folder, or mend the folder:\n  "
            + "\n  ".join(lines[:_MAX_LINES] + more)
        )


def held_parts(tensor: Tensor) -> list[Held]:
    """The parts of a parameter that this rank holds; all of it, if it is not sharded."""
    if not isinstance(tensor, torch_api.DTensor):
        whole = tuple(slice(0, size) for size in tensor.shape)
        return [Held(whole, whole)]
    if tensor.to_local().numel() == 0:
        return []
    by_dim = [list(_runs(indices)) for indices in held_indices(tensor)]
    parts = []
    for runs in itertools.product(*by_dim):
        boxes, places = zip(*runs, strict=True)
        parts.append(Held(boxes, places))
    return parts


def pieces_of(files: WeightFiles, layout: Layout, name: str, held: Held) -> Iterator[tuple[Box, Tensor]]:  # fmt: skip
    """Read what a rank holds of parameter ``name``; yield parts with their place in the rank's tensor."""
    other_names = {first: second for second, first in layout.aliases.items()}
    for piece in layout.by_ours[name]:
        source = piece.source(held.box)
        if source is None:
            continue
        stored = piece.theirs if piece.theirs in files.stored else other_names[piece.theirs]
        part = files.read(stored, source)
        if piece.entry is None:
            yield held.at, piece.to_ours(part, held.box)
        else:
            entry = held.at[0].start + piece.entry - held.box[0].start
            place = (slice(entry, entry + 1), *held.at[1:])
            yield place, piece.to_ours(part, held.box[1:])[None]


def _fill(files: WeightFiles, layout: Layout, model: Model) -> None:
    for name, tensor in local_tensors(model).items():
        fill_tensor(files, layout, name, tensor)


@torch.no_grad()
def fill_tensor(files: WeightFiles, layout: Layout, name: str, tensor: Tensor) -> None:
    """Fill what this rank holds of parameter or buffer ``name``."""
    local = tensor.to_local() if isinstance(tensor, torch_api.DTensor) else tensor
    if name in layout.own:
        local.zero_()
        return
    for held in held_parts(tensor):
        for place, value in pieces_of(files, layout, name, held):
            local[place] = value.to(local.device, local.dtype)


def local_tensors(model: Model) -> dict[str, Tensor]:
    """This rank's parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _runs(indices: Tensor) -> Iterator[tuple[slice, slice]]:
    """Stretches of consecutive indices: (in the whole, in the local tensor)."""
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(indices)]
    for start, stop in itertools.pairwise(edges):
        first = int(indices[start])
        yield slice(first, first + stop - start), slice(start, stop)


def _misfits(stored: Mapping[str, TensorInfo], layout: Layout) -> Iterator[str]:
    wanted = {name: pieces[0].their_shape for name, pieces in layout.by_theirs.items()}
    for second, first in layout.aliases.items():  # a tied tensor: either name, or both
        if second in stored:
            wanted[second] = wanted[first]
            if first not in stored:
                del wanted[first]
    missing = sorted(wanted.keys() - stored.keys())
    unknown = sorted(stored.keys() - wanted.keys())
    for index, name in enumerate(missing):
        yield f"missing: {name} {list(wanted[name])}{_hint(name, unknown, index, 'the folder')}"
    for index, name in enumerate(unknown):
        yield f"unknown: {name} ({stored[name]}){_hint(name, missing, index, 'the model')}"
    for name in sorted(wanted.keys() & stored.keys()):
        info = stored[name]
        if info.shape != wanted[name]:
            yield f"wrong shape: {name} is {list(info.shape)}, the model has {list(wanted[name])}"
        if info.dtype not in _READABLE:
            yield f"wrong type: {name} is {info.dtype}, weights are one of {', '.join(_READABLE)}"


def _hint(name: str, options: Sequence[str], index: int, owner: str) -> str:
    near = difflib.get_close_matches(name, options, n=1) if index < _MAX_HINTS else []
    return f"; {owner} has {near[0]}" if near else ""


def check_aliases(files: WeightFiles, layout: Layout) -> None:
    """See that a tied tensor that the folder has twice is the same both times.

    Raises:
        CheckpointError: if not.
    """
    for second, first in layout.aliases.items():
        if not {first, second} <= files.stored.keys():
            continue
        rows, *rest = files.stored[first].info.shape
        others = tuple(slice(0, size) for size in rest)
        for start in range(0, rows, _CHUNK_ROWS):
            box = (slice(start, min(start + _CHUNK_ROWS, rows)), *others)
            if not torch.equal(files.read(first, box), files.read(second, box)):
                raise CheckpointError(
                    f"{second} is not {first}, although the model ties them; set model.tied=False to load both"
                )
