"""What a step computes and moves on one rank, and how long that takes at least."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan.debug.dry_run import fake_ranks, traffic_of, uncounted_axes
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.tape import Tape, record
from torchtitan.models.model import ParameterCounts
from torchtitan.optim.param_groups import group_parameters
from torchtitan.parallel.degrees import Degrees
from torchtitan.parallel.traffic import Step, Traffic
from torchtitan.planner.devices import NETWORK_GB_PER_S, NODE_RANKS, Device
from torchtitan.planner.setup import Setup, setup
from torchtitan.trainer import Trainer, cut_model
from torchtitan.training.settings import Training

_WHAT_FOR = {
    "pp": "pipeline",
    "dp_replicate": "adding copies' gradients",
    "cp": "context parallel",
    "tp": "tensor parallel",
    "ep": "expert parallel",
}
"""What is sent over an axis; FSDP's are told apart by the operation."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step of one rank.

    Attributes:
        counts: parameters of the whole model.
        tokens_global: of a step, over all ranks.
        flops: forward and backward, without recomputation.
        recomputed_flops: what activation checkpointing adds.
        update_bytes: of memory that the optimizer reads and writes.
        traffic: what it sends to other ranks.
        uncounted: axes whose traffic is not known.
        degrees: of the mesh.
    """

    counts: ParameterCounts
    tokens_global: int
    flops: float
    recomputed_flops: float
    update_bytes: float
    traffic: Sequence[Traffic]
    uncounted: Sequence[str]
    degrees: Degrees

    @property
    def sent_bytes(self) -> Mapping[str, float]:
        """Bytes to other ranks, by what for."""
        found: dict[str, float] = defaultdict(float)
        for row in self.traffic:
            gathers = row.operation == "all_gather"
            fsdp = "gathering parameters" if gathers else "reducing gradients"
            found[_WHAT_FOR.get(row.axis, fsdp)] += row.sent_bytes
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least seconds of each kind of work, at the device's peak rates.

    Attributes:
        compute_s: of matrix products.
        update_s: of the optimizer's reads and writes.
        link_s: of what goes to neighbours in the machine.
        network_s: of what goes to other machines.
    """

    compute_s: float
    update_s: float
    link_s: float
    network_s: float

    @property
    def communication_s(self) -> float:
        """Of all that is sent, one after another."""
        return self.link_s + self.network_s

    @property
    def step_s(self) -> float:
        """At least, with all communication hidden, links and network busy at the same time."""
        return max(self.compute_s, self.link_s, self.network_s) + self.update_s

    @property
    def step_exposed_s(self) -> float:
        """At least, with none hidden."""
        return self.compute_s + self.communication_s + self.update_s


def work_of(config: Trainer.Config, world_size: int) -> Work:
    """The work of the first rank (of the first stages, in a pipeline)."""
    run = setup(config, world_size)
    whole = setup(_without_pipeline(config), run.degrees.world // run.degrees.pp).stages[0].model
    group_parameters(  # raises what the run would
        whole.named_parameters(), config.optimizer.param_groups, weight_decay=0.0
    )
    training = config.training
    tokens = training.global_batch_rows * training.seq_len
    flops = whole.flops_per_token(training.seq_len) * tokens / world_size
    state = sum(unit.optimizer for unit in run.units)
    trainable = sum(unit.trainable for unit in run.units)
    traffic = _traffic(config, run)
    return Work(
        counts=whole.parameter_counts(),
        tokens_global=tokens,
        flops=flops,
        recomputed_flops=_recomputed(run),
        update_bytes=3 * trainable * run.param_itemsize + 2 * state,
        traffic=traffic,
        uncounted=uncounted_axes(run.degrees, traffic),
        degrees=run.degrees,
    )


def _traffic(config: Trainer.Config, run: Setup) -> list[Traffic]:
    """What rank 0 sends in a step, from its model as it is cut, without memory and without the other ranks."""
    if run.degrees.world == 1:
        return []
    place = run.place
    step = Step(run.micro_batches, place.rows, place.seq_len, place.itemsize)
    dtype = Training.compute_dtype(config.training, torch.device("cuda"))
    with fake_ranks(run.degrees.world, 0):
        mesh = config.parallelism.build(torch.device("cpu"))
        return traffic_of(cut_model(config, mesh, dtype, meta=True), mesh, step)


def bounds_of(work: Work, device: Device, *, node_ranks: int = NODE_RANKS) -> Bounds | None:
    """How long a step takes at least; None if the device's rates are not known.

    Args:
        work: of a rank.
        device: that it runs on.
        node_ranks: ranks of a machine, which are neighbours on the mesh's inner axes.
    """
    if not (device.peak_tflops and device.memory_tb_per_s and device.link_gb_per_s):
        return None
    link = network = 0.0
    for row in work.traffic:
        leaving, adapters = _leaving(row, work.degrees, node_ranks)
        link += (row.sent_bytes - leaving) / (device.link_gb_per_s * 1e9)
        network += leaving / (adapters * NETWORK_GB_PER_S * 1e9)
    return Bounds(
        compute_s=(work.flops + work.recomputed_flops) / (device.peak_tflops * 1e12),
        update_s=work.update_bytes / (device.memory_tb_per_s * 1e12),
        link_s=link,
        network_s=network,
    )


def _leaving(row: Traffic, degrees: Degrees, node_ranks: int) -> tuple[float, int]:
    """Bytes of a rank that must leave its machine, and over how many network adapters.

    Of n ranks of which m share a machine, a rank has n - m of its n - 1 peers elsewhere. What is the same for all m (gathers
    and sums) enters and leaves the machine once, over the adapters of all of them; the rest goes over the rank's own.
    """
    stride = _stride(row.axis, degrees)
    here = min(row.ranks, max(1, node_ranks // stride))
    leaving = row.sent_bytes * (row.ranks - here) / (row.ranks - 1)
    return leaving, 1 if row.operation in ("all_to_all", "send") else here


def _stride(axis: str, degrees: Degrees) -> int:
    """Between the numbers of two neighbours along an axis; see `Mesh`."""
    strides = {
        "tp": 1,
        "ep": 1,
        "efsdp": degrees.ep,
        "cp": degrees.tp,
        "fsdp": degrees.tp,
        "dp_replicate": degrees.tp * degrees.fsdp,
        "pp": degrees.world // degrees.pp,
    }
    return strides[axis]


def _without_pipeline(config: Trainer.Config) -> Trainer.Config:
    tree = config.resolved()
    tree.parallelism.pp = 1
    return tree


def _recomputed(run: Setup) -> float:
    """FLOPs of what activation checkpointing computes again in a step."""
    recompute, place, flops = run.recompute, run.place, 0.0
    for stage in run.stages:
        for i, block in enumerate(stage.model.blocks()):
            if recompute.mode != "budget" and i % recompute.every_n_blocks:
                continue
            tape = Tape(place)
            record(block, tape, tape.stream(stage.model.stage_shape(1, 1)[-1]))
            scores = sum(
                m.score_flops_per_token(place.seq_len, causal=True)
                for m in block.modules()
                if isinstance(m, GQA)
            )
            attention = scores / 3 * place.tokens / place.tp  # a third is the forward's
            flops += tape.recomputed_flops(
                recompute.mode, recompute.save_every_n_matmuls, attention
            )
    if (
        recompute.mode == "budget"
    ):  # at most: the compiler begins with what is cheap to compute again
        flops *= 1 - recompute.memory_budget
    return run.micro_batches * flops
