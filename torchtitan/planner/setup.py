"""What the planner knows of a run on one rank, taken from its config: no process group, no weights, no cut model."""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
from torch import nn

from torchtitan.config.serialize import to_dict
from torchtitan.models.layers.plan import Cut
from torchtitan.models.layers.tape import Place
from torchtitan.models.model import Model
from torchtitan.optim.optimizer import Optimizer
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.parallel.degrees import Degrees
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.pipeline_schedule import SINGLE
from torchtitan.parallel.tensor import module_cuts
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that FSDP gathers together.

    Attributes:
        gathered: elements when gathered on this rank, with padding.
        shard: elements that the rank keeps.
        trainable: elements of the shard that have a gradient.
        optimizer: bytes of optimizer state.
        update: bytes that the update of its largest parameter needs at once besides.
        last: elements of its last parameter when gathered.
    """

    gathered: int
    shard: int
    trainable: int
    optimizer: int
    update: int
    last: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks of a rank, with what stands before and after them.

    Attributes:
        model: what is here, on the meta device.
        blocks: one unit a block.
        edges: units of embedding and head where they are their own, by ``embedding`` and ``head``.
        rest: the unit of all that is in no other, gathered from forward to backward.
        in_flight: micro-batches whose activations are kept at once.
    """

    model: Model
    blocks: Sequence[Unit]
    edges: Mapping[str, Unit]
    rest: Unit
    in_flight: int


@dataclass(frozen=True, slots=True)
class Setup:
    """One rank of a run.

    Attributes:
        place: where its layers run.
        degrees: of the mesh.
        stages: those of the rank; one without a pipeline.
        micro_batches: forward and backward passes of a step.
        param_itemsize: bytes of a parameter, and of its gradient.
        reduce_itemsize: bytes of a gradient while it is reduced.
        sharded: whether FSDP is there; one rank that casts nothing goes without.
        reshard: whether a block frees its gathered parameters until its backward.
        recompute: activation checkpointing.
        gathers_stages: whether a pipeline's schedule gathers whole stages, and keeps those that are used next.
        in_backward: whether the optimizer steps in the backward, so that gradients do not pile up.
    """

    place: Place
    degrees: Degrees
    stages: Sequence[Stage]
    micro_batches: int
    param_itemsize: int
    reduce_itemsize: int
    sharded: bool
    reshard: bool
    recompute: ActivationCheckpointing.Config
    gathers_stages: bool
    in_backward: bool

    @property
    def units(self) -> list[Unit]:
        """All units of the rank."""
        return [u for s in self.stages for u in (*s.blocks, *s.edges.values(), s.rest)]


def setup(
    config: Trainer.Config,
    world_size: int,
    *,
    gpu: bool = True,
    packed: bool = True,
    pp_rank: int = 0,
) -> Setup:
    """Take from ``config`` what memory and work follow from.

    Args:
        config: of the run, checked for ``world_size``.
        world_size: ranks.
        gpu: whether it runs on GPUs.
        packed: whether rows hold several documents.
        pp_rank: which rank of a pipeline.
    """
    training, mesh = config.training, config.parallelism
    degrees = mesh.resolve(world_size)
    dtype = Training.compute_dtype(training, torch.device("cuda" if gpu else "cpu"))
    rows = training.global_batch_rows // degrees.data
    micro_rows = training.micro_batch_rows or mesh.pipeline.micro_batch_rows(degrees.pp, rows)
    place = Place(
        rows=micro_rows,
        seq_len=training.seq_len,
        itemsize=dtype.itemsize,
        gpu=gpu,
        packed=packed,
        tp=degrees.tp,
        cp=degrees.cp,
        ep=degrees.ep,
        sequence_shards=degrees.sequence_shards,
    )
    kept = getattr(torch, training.parameter_dtype)
    gathers_stages = degrees.pp > 1 and mesh.pipeline.schedule not in SINGLE
    return Setup(
        place=place,
        degrees=degrees,
        stages=_stages(config, kept, degrees, pp_rank, rows // micro_rows),
        micro_batches=rows // micro_rows,
        param_itemsize=kept.itemsize,
        reduce_itemsize=4,
        sharded=world_size > 1 or {dtype, kept} != {torch.float32},
        reshard=mesh.reshard_after_forward and not gathers_stages,
        recompute=config.activation_checkpointing,
        gathers_stages=gathers_stages,
        in_backward=config.optimizer.in_backward,
    )


@dataclass(frozen=True, slots=True)
class _Plain:
    """A model that is not cut over ranks yet, or one stage of it. It is only looked at, so it is made once.

    Attributes:
        model: on the meta device, in the parameters' type.
        parameters: each with its name and how its module is cut.
    """

    model: Model
    parameters: Mapping[nn.Parameter, tuple[str, Cut]]

    @classmethod
    def of(cls, model: Model) -> "_Plain":
        names = {parameter: name for name, parameter in model.named_parameters()}
        cuts = {
            parameter: (names[parameter], cut)
            for module, cut in module_cuts(model).values()
            for parameter in module.parameters(recurse=False)
        }
        return cls(model, cuts)


@dataclass(frozen=True, slots=True)
class _Blueprint:
    """What a model is made from; equal ones make equal models."""

    text: str
    dtype: torch.dtype
    config: Model.Config = field(compare=False)

    @classmethod
    def of(cls, config: Model.Config, dtype: torch.dtype) -> "_Blueprint":
        return cls(json.dumps(to_dict(config), sort_keys=True), dtype, copy.deepcopy(config))


@functools.lru_cache(maxsize=8)
def _whole(blueprint: _Blueprint) -> _Plain:
    with torch.device("meta"):
        return _Plain.of(blueprint.config.build().to(blueprint.dtype))


@functools.lru_cache(maxsize=128)
def _part(blueprint: _Blueprint, start: int, stop: int, first: bool, last: bool) -> _Plain:
    part = _twin(_whole(blueprint).model)
    part.keep(range(start, stop), first, last)
    return _Plain.of(part)


def _twin(module: _M) -> _M:
    """A copy whose modules can be taken out and replaced, with the same parameters."""
    twin = copy.copy(module)
    twin._modules = {name: child and _twin(child) for name, child in module._modules.items()}
    return twin


_Locals = dict[nn.Parameter, tuple[str, list[int], int]]
"""Name, shape and ranks of each parameter."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How parameters become shards."""

    degrees: Degrees
    optimizer: Optimizer.Config

    def units(self, plain: _Plain) -> tuple[list[Unit], dict[str, Unit], Unit]:
        """Blocks, edges and the rest of a model or stage."""
        model, local = plain.model, self._local_shapes(plain)
        edges = {
            "head" if module is getattr(model, "head", None) else "embedding": module
            for module in model.edge_units()
        }
        blocks = [self._unit(block, local) for block in model.blocks()]
        own = {name: self._unit(module, local) for name, module in edges.items()}
        inside = {p for module in (*model.blocks(), *edges.values()) for p in module.parameters()}
        rest = [p for p in model.parameters() if p not in inside]
        return blocks, own, self._of(rest, local)

    def _local_shapes(self, plain: _Plain) -> _Locals:
        """Name, shape on a rank before FSDP, and the ranks that FSDP shards it over, for each parameter."""
        degrees = self.degrees
        found: _Locals = {}
        for parameter, (name, cut) in plain.parameters.items():
            shape, ranks = list(parameter.shape), degrees.fsdp
            if cut.elsewhere:
                shape[0], ranks = -(-shape[0] // degrees.ep), degrees.efsdp
            elif cut.shard_dim is not None and cut.shard_dim < len(shape):
                shape[cut.shard_dim] = -(-shape[cut.shard_dim] // degrees.tp)
            found[parameter] = name, shape, ranks
        return found

    def _unit(self, module: nn.Module, local: _Locals) -> Unit:
        return self._of(list(module.parameters()), local)

    def _of(self, parameters: Sequence[nn.Parameter], local: _Locals) -> Unit:
        gathered = shard = trainable = state = update = last = 0
        optimizer = self.optimizer
        for parameter in parameters:
            name, shape, ranks = local[parameter]
            rows = -(-shape[0] // ranks)
            if len(shape) == 3 and shape[0] < ranks and shape[1] % ranks == 0:
                rows, shape = shape[0], [shape[0], shape[1] // ranks, shape[2]]  # within experts
            part = (rows, *shape[1:])
            last = prod(part) * ranks
            gathered += last
            shard += prod(part)
            if parameter.requires_grad:
                trainable += prod(part)
                state += optimizer.state_bytes(name, parameter, part)
                update = max(update, optimizer.update_bytes(name, parameter, part))
        return Unit(gathered, shard, trainable, state, update, last)


def _stages(
    config: Trainer.Config, dtype: torch.dtype, degrees: Degrees, pp_rank: int, micro_batches: int
) -> list[Stage]:
    """The stages of a rank."""
    cut, blueprint = _Cut(degrees, config.optimizer), _Blueprint.of(config.model, dtype)
    if degrees.pp == 1:
        plain = _whole(blueprint)
        return [Stage(plain.model, *cut.units(plain), in_flight=1)]
    pipeline = config.parallelism.pipeline.build(pp=degrees.pp, n_blocks=config.model.n_blocks)
    stages: list[Stage] = []
    for number in pipeline.stages_of(pp_rank):
        blocks = pipeline.blocks[number]
        first, last = number == 0, number == pipeline.n_stages - 1
        part = _part(blueprint, blocks.start, blocks.stop, first, last)
        kept = _in_flight(pipeline, degrees.pp, pp_rank, number, micro_batches)
        stages.append(Stage(part.model, *cut.units(part), in_flight=kept))
    return stages


def _in_flight(pipeline: Pipeline, pp: int, rank: int, stage: int, micro_batches: int) -> int:
    """Micro-batches that ``stage`` has gone forward with and not yet back, at most."""
    now = most = 0
    for action in pipeline.config.order(pp, micro_batches)[rank]:
        if action.stage == stage:
            now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
    return most
