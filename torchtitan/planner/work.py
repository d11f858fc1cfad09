"""What a step computes and moves on one rank, and how long that takes at least."""

# Letters: N ranks that shard, R copies, t ranks of tp, M micro-batches, T tokens, D width, b bytes of an activation.

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.models.layers.linear import Linear
from torchtitan.models.layers.moe import MoE
from torchtitan.models.model import ParameterCounts
from torchtitan.planner.devices import NETWORK_GB_PER_S, NODE_RANKS, Device
from torchtitan.planner.setup import Setup, Stage, Unit, setup
from torchtitan.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Work:
    """A step of one rank.

    Attributes:
        counts: parameters of the whole model.
        tokens_global: of a step, over all ranks.
        flops: forward and backward, without recomputation.
        recomputed_flops: what activation checkpointing adds.
        update_bytes: of memory that the optimizer reads and writes.
        sent_bytes: to other ranks, by what for.
    """

    counts: ParameterCounts
    tokens_global: int
    flops: float
    recomputed_flops: float
    update_bytes: float
    sent_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least seconds of each kind of work, at the device's peak rates.

    Attributes:
        compute_s: of matrix products.
        update_s: of the optimizer's reads and writes.
        communication_s: of what is sent, one after another.
    """

    compute_s: float
    update_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """At least, with all communication hidden."""
        return max(self.compute_s, self.communication_s) + self.update_s

    @property
    def step_exposed_s(self) -> float:
        """At least, with none hidden."""
        return self.compute_s + self.communication_s + self.update_s


def work_of(config: Trainer.Config, world_size: int) -> Work:
    """The work of the first rank (of the first stages, in a pipeline)."""
    run = setup(config, world_size)
    whole = setup(_without_pipeline(config), run.degrees.world // run.degrees.pp).stages[0].model
    training = config.training
    tokens = training.global_batch_rows * training.seq_len
    flops = whole.flops_per_token(training.seq_len) * tokens / world_size
    state = sum(unit.optimizer for unit in run.units)
    trainable = sum(unit.trainable for unit in run.units)
    return Work(
        counts=whole.parameter_counts(),
        tokens_global=tokens,
        flops=flops,
        recomputed_flops=_recomputed(config, whole.parameter_counts(), flops, tokens / world_size),
        update_bytes=3 * trainable * run.param_itemsize + 2 * state,
        sent_bytes={what: sent for what, sent in _sent(run, config).items() if sent},
    )


def bounds_of(work: Work, world_size: int, device: Device) -> Bounds | None:
    """How long a step takes at least; None if the device's rates are not known."""
    if not (device.peak_tflops and device.memory_tb_per_s and device.link_gb_per_s):
        return None
    link = device.link_gb_per_s if world_size <= NODE_RANKS else NETWORK_GB_PER_S
    return Bounds(
        compute_s=(work.flops + work.recomputed_flops) / (device.peak_tflops * 1e12),
        update_s=work.update_bytes / (device.memory_tb_per_s * 1e12),
        communication_s=sum(work.sent_bytes.values()) / (link * 1e9),
    )


def _without_pipeline(config: Trainer.Config) -> Trainer.Config:
    tree = config.resolved()
    tree.parallelism.pp = 1
    return tree


def _recomputed(
    config: Trainer.Config, counts: ParameterCounts, flops: float, tokens: float
) -> float:
    """A forward of the blocks that are computed again: a third of their FLOPs, the head not among them."""
    recompute = config.activation_checkpointing
    if recompute.mode == "none":
        return 0.0
    head = 6.0 * counts.embedding * tokens
    blocks = (flops - head) / 3 / recompute.every_n_blocks
    if recompute.mode == "selective" and recompute.save_every_n_matmuls:
        blocks *= 1 - 1 / recompute.save_every_n_matmuls
    if (
        recompute.mode == "budget"
    ):  # at most: the compiler begins with what is cheap to compute again
        blocks = (flops - head) / 3 * (1 - recompute.memory_budget)
    return blocks


def _sent(run: Setup, config: Trainer.Config) -> dict[str, float]:
    """Bytes that the rank sends in a step, by ring algorithms."""
    degrees, place, micro = run.degrees, run.place, run.micro_batches
    gathered = reduced = copied = stream = exchanged = 0.0
    for stage in run.stages:
        for unit, uses in _uses(run, stage):
            n = unit.gathered / unit.shard if unit.shard else 1
            gathered += uses * micro * unit.gathered * place.itemsize * (n - 1) / n
            reduced += unit.gathered * run.reduce_itemsize * (n - 1) / n
            copied += 2 * unit.shard * run.reduce_itemsize
        n_blocks, dim = len(stage.blocks), stage.model.stage_shape(1, 1)[-1]
        size = micro * place.tokens * dim * place.itemsize
        again = (
            2 if run.recompute.mode == "full" else 0
        )  # a gather more for attention and feed-forward
        stream += n_blocks * (8 + again) * size + 4 * size * len(stage.edges or (1,)) / 2
        moes = [m for m in stage.model.modules() if isinstance(m, MoE)]
        slots = sum(m.config.router.top_k for m in moes) / place.sequence_shards
        exchanged += 4 * size * slots
    boundaries = 2.0 if degrees.pp > 2 else 1.0  # a neighbour before and one after
    edge = micro * place.tokens * run.stages[0].model.stage_shape(1, 1)[-1] * place.itemsize
    return {
        "gathering parameters": gathered,
        "reducing gradients": reduced,
        "adding copies' gradients": copied * _share(degrees.dp_replicate),
        "tensor parallel": stream * _share(degrees.tp) if degrees.tp > 1 else 0.0,
        "context parallel": _context(run, config),
        "expert parallel": exchanged * _share(degrees.ep),
        "pipeline": boundaries * edge if degrees.pp > 1 else 0.0,
    }


def _uses(run: Setup, stage: Stage) -> list[tuple[Unit, int]]:
    """Units with how often a micro-batch gathers them: twice, or once where they stay until the backward."""
    freed = 2 if run.sharded and run.reshard else 1
    units = [(unit, freed) for unit in stage.blocks[:-1]]
    units += [(unit, 1) for unit in stage.blocks[-1:]]
    units += [(unit, 1 if name == "head" else freed) for name, unit in stage.edges.items()]
    return [*units, (stage.rest, 1)]


def _share(ranks: int) -> float:
    """Part of a tensor that a ring sends."""
    return (ranks - 1) / ranks


def _context(run: Setup, config: Trainer.Config) -> float:
    """Keys and values of the other ranks: sent in the forward, and twice that in the backward (values and gradients)."""
    cp, place = run.degrees.cp, run.place
    if cp == 1:
        return 0.0
    sent = 0
    for stage in run.stages:
        for name, module in stage.model.named_modules():
            if isinstance(module, Linear) and name.endswith(("k_proj", "v_proj")):
                sent += place.tokens * module.out_features // place.tp * place.itemsize * (cp - 1)
    again = config.activation_checkpointing.mode == "full"
    return run.micro_batches * (3 + again) * sent
