"""A Hugging Face folder from the weights of a model: written by all ranks, read back, compared, and only then named."""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan import torch_api
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.files import sync_folder
from torchtitan.checkpoint.hugging_face.folder import CONFIG, family_of
from torchtitan.checkpoint.hugging_face.loading import check_tensors, held_parts, pieces_of
from torchtitan.checkpoint.hugging_face.tokenizer_files import (
    write_generation_config,
    write_tokenizer_files,
)
from torchtitan.checkpoint.hugging_face.weight_files import INDEX, SINGLE, WeightFiles
from torchtitan.checkpoint.hugging_face.weights import Weights, hf_tensors
from torchtitan.errors import CheckpointError
from torchtitan.models.mapping import Layout
from torchtitan.models.model import Model

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]
_SMALLEST_SHARE = 64 << 20  # bytes; for less, another writer is not worth another file


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an export is to look like.

    Attributes:
        folder: to write; must not exist, or be empty.
        dtype: of the weights.
        tokenizer: a folder with a tokenizer, or a ``tokenizer.json``; None to write none.
        generation: ``generation_config.json`` of the model that this one was made from.
        chat_template: the text of it; None for the tokenizer's own.
        max_shard_bytes: largest file, unless one tensor is larger.
        allow_loss: leave out state that the format has no place for.
    """

    folder: Path
    dtype: Dtype = "bfloat16"
    tokenizer: Path | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    max_shard_bytes: int = 5 << 30
    allow_loss: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was written, and how it compares with the weights that it was made from.

    Attributes:
        folder: where it is.
        n_tensors: in it.
        n_bytes: of weights.
        n_files: of weights.
        dtype: of the weights.
        rounding: largest difference between a weight and what was written, absolute.
    """

    folder: Path
    n_tensors: int
    n_bytes: int
    n_files: int
    dtype: str
    rounding: float

    def __str__(self) -> str:
        kept = "bit for bit" if self.rounding == 0 else f"rounded to {self.dtype}, by at most {self.rounding:.2g}"  # fmt: skip
        files = "1 file" if self.n_files == 1 else f"{self.n_files} files"
        return (
            f"{self.folder}: {self.n_tensors} tensors, {self.n_bytes / 2**30:.3f} GiB of {self.dtype} in {files}; "
            f"read back: all equal the model's weights, {kept}"
        )


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file: its tensors, the ranks that must read together to make them, and the one of them that writes."""

    names: tuple[str, ...]
    n_bytes: int
    ranks: tuple[int, ...]
    writer: int


def export(weights: Weights, config: Model.Config, target: Target, ranks: Agreement) -> Verdict:
    """Write a folder that other programs load as it is. The weights are only read. Collective.

    Args:
        weights: of the model.
        config: of the model.
        target: what the folder is to be.
        ranks: those that have the weights.

    Raises:
        ConfigError: if the model has no such format, or the format no words for it.
        CheckpointError: if the folder is in use, something would be lost, writing fails, or what was written is not what
            was to be written; no folder is left then.
    """
    family = family_of(config)
    hf, layout = family.to_hf(config), family.layout(config)
    what = f"exporting to {target.folder}"
    ranks.each(what, lambda: _refuse_loss(weights, layout, target))
    shards = _plan(ranks.each(what, weights.names), layout, target)
    temporary = ranks.first(what, lambda: _begin(target.folder))
    try:
        ranks.each(what, lambda: _write_weights(weights, layout, target, shards, temporary, ranks.rank))  # fmt: skip
        ranks.first(what, lambda: _write_rest(hf, target, shards, temporary))
        rounding = max(ranks.each(what, lambda: _compare(weights, layout, target, temporary)))
        ranks.first(what, lambda: _commit(temporary, target.folder))
    finally:
        ranks.first(what, lambda: shutil.rmtree(temporary, ignore_errors=True))
    verdict = Verdict(
        target.folder,
        n_tensors=len(layout.by_theirs),
        n_bytes=sum(shard.n_bytes for shard in shards),
        n_files=len(shards),
        dtype=target.dtype,
        rounding=rounding,
    )
    log.info("exported %s", verdict)
    return verdict


def _refuse_loss(weights: Weights, layout: Layout, target: Target) -> None:
    lost = [name for name in sorted(layout.own & set(weights.names())) if bool(weights.read(name).any())]  # fmt: skip
    if not lost:
        return
    if not target.allow_loss:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise CheckpointError(
            f"the format has no place for {lost[0]}{more}, which is not 0, so the exported model would choose other experts; "
            "train the last steps with router.bias_rate=None, or leave it out with --allow-loss"
        )
    log.warning("left out, the format has no place for it: %s", ", ".join(lost))


def _plan(names_of_ranks: Sequence[list[str]], layout: Layout, target: Target) -> list[_Shard]:
    """Deal the tensors to files, in the layout's order; those of a file are on the same ranks, which take turns writing."""
    itemsize = getattr(torch, target.dtype).itemsize
    holders: dict[str, tuple[int, ...]] = {}
    for name in layout.by_ours:
        holders[name] = tuple(r for r, names in enumerate(names_of_ranks) if name in set(names))
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, pieces in layout.by_theirs.items():
        on = set.intersection(*(set(holders[piece.ours]) for piece in pieces))
        if not on:
            raise CheckpointError(f"no rank has all of {name}: {sorted({p.ours for p in pieces})} are not there")  # fmt: skip
        n_bytes = torch.Size(pieces[0].their_shape).numel() * itemsize
        groups.setdefault(tuple(sorted(on)), []).append((name, n_bytes))
    total = sum(n_bytes for group in groups.values() for _, n_bytes in group)
    share = max(-(-total // len(names_of_ranks)), _SMALLEST_SHARE)
    shards = []
    for on, group in groups.items():
        for turn, part in enumerate(_cut(group, min(target.max_shard_bytes, share))):
            names, sizes = zip(*part, strict=True)
            shards.append(_Shard(names, sum(sizes), on, on[turn % len(on)]))
    return shards


def _cut(group: list[tuple[str, int]], limit: int) -> Iterator[list[tuple[str, int]]]:
    """Neighbours together, up to ``limit`` bytes."""
    part: list[tuple[str, int]] = []
    for name, n_bytes in group:
        if part and sum(size for _, size in part) + n_bytes > limit:
            yield part
            part = []
        part.append((name, n_bytes))
    yield part


def _file_name(shards: Sequence[_Shard], number: int) -> str:
    if len(shards) == 1:
        return SINGLE
    return f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"


def _write_weights(
    weights: Weights,
    layout: Layout,
    target: Target,
    shards: Sequence[_Shard],
    to: Path,
    rank: int,
) -> None:
    dtype = getattr(torch, target.dtype)
    for number, shard in enumerate(shards):
        if rank not in shard.ranks:
            continue
        kept: dict[str, Tensor] = {}
        for name, tensor in hf_tensors(weights, layout, shard.names):
            if rank == shard.writer:
                kept[name] = tensor.to("cpu", dtype, copy=True).contiguous()
        if rank == shard.writer:
            path = to / _file_name(shards, number)
            path.touch()
            # As the user's settings make files; save_file's are for its owner only.
            mode = path.stat().st_mode
            save_file(kept, path, metadata={"format": "pt"})
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _write_rest(hf: dict[str, Any], target: Target, shards: Sequence[_Shard], to: Path) -> None:
    """Everything beside the weights."""
    if len(shards) > 1:
        places = {name: _file_name(shards, i) for i, shard in enumerate(shards) for name in shard.names}  # fmt: skip
        total = sum(shard.n_bytes for shard in shards)
        _write_json(to / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})  # fmt: skip
    if target.tokenizer is not None:
        write_tokenizer_files(target.tokenizer, to, target.chat_template)
    generation = write_generation_config(to, target.generation)
    ids = {key: generation[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in generation}  # fmt: skip
    # transformers 4 reads torch_dtype, 5 dtype
    _write_json(to / CONFIG, {**hf, **ids, "dtype": target.dtype, "torch_dtype": target.dtype})


def _compare(weights: Weights, layout: Layout, target: Target, folder: Path) -> float:
    """Read this rank's part of every weight back; return the largest difference.

    Raises:
        CheckpointError: if anything is not the weight in the type that was asked for, or not finite.
    """
    files, dtype = WeightFiles(folder), getattr(torch, target.dtype)
    check_tensors(files, layout)
    wrong: list[str] = []
    largest = 0.0
    for name in weights.names():
        if name in layout.own:
            continue
        tensor = weights.held(name)
        local = tensor.to_local() if isinstance(tensor, torch_api.DTensor) else tensor
        for held in held_parts(tensor):
            for place, value in pieces_of(files, layout, name, held):
                exact = local[place].cpu()
                if value.dtype != dtype or not torch.equal(value, exact.to(dtype)):
                    wrong.append(f"{name} is not what was written")
                elif not bool(value.isfinite().all()):
                    cause = "does not fit" if bool(exact.isfinite().all()) else "is not finite"
                    wrong.append(f"{name} has a number that {cause} in {target.dtype}")
                elif value.numel():
                    largest = max(largest, float((value.double() - exact.double()).abs().max()))
    if wrong:
        raise CheckpointError("what was read back is not the model: " + "; ".join(dict.fromkeys(wrong[:20])))  # fmt: skip
    return largest


def _begin(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError("it exists and is not empty; name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    return temporary


def _commit(temporary: Path, folder: Path) -> None:
    sync_folder(temporary)
    if folder.exists():
        folder.rmdir()
    os.rename(temporary, folder)
    sync_folder(folder.parent)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
