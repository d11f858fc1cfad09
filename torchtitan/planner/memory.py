"""Memory of a rank at the moments that can be its peak, in closed form: integers, no tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.models.layers.head import Head
from torchtitan.models.layers.tape import Cost, Tape, record
from torchtitan.parallel.fsdp_traffic import STAGES_GATHERED
from torchtitan.planner.setup import Setup, Stage, Unit, setup
from torchtitan.trainer import Trainer

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "buffers",
)
"""What memory is for. ``gathered`` are whole parameters while they are used, ``buffers`` those of collectives; ``logits``
is the loss with its gradients of states and weight."""

FRAGMENTATION = 0.04
"""Part of the peak that the caching allocator cannot use, 3 to 6 % as a rule."""
CONTEXT_BYTES = 2 * 2**30
"""Of a process on a GPU: CUDA context, NCCL, cuBLAS workspaces; 1.5 to 2.5 GiB."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds at one time.

    Attributes:
        name: ``loss``, ``backward`` or ``update``.
        when: the same in words.
        held: bytes by kind; see `KINDS`.
    """

    name: str
    when: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """The three moments of a rank.

    Attributes:
        moments: of the loss, of the worst block's backward, and of the end of the backward and the update.
        gpu: whether there is an allocator and a context beside them.
    """

    moments: Sequence[Moment]
    gpu: bool

    @property
    def peak(self) -> Moment:
        """The moment with most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def overhead(self) -> int:
        """Bytes beside tensors: fragments of the allocator and the process's context."""
        return int(self.peak.total * FRAGMENTATION) + CONTEXT_BYTES if self.gpu else 0

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return self.peak.total + self.overhead


def plan_memory(
    config: Trainer.Config, world_size: int, *, gpu: bool = True, packed: bool = True
) -> Memory:
    """Memory of the rank that needs most; in a pipeline the ranks differ. See `setup`."""
    pp = config.parallelism.resolve(world_size).pp
    ranks = (
        memory_of(setup(config, world_size, gpu=gpu, packed=packed, pp_rank=pp_rank))
        for pp_rank in range(pp)
    )
    return max(ranks, key=lambda memory: memory.total)


def memory_of(run: Setup) -> Memory:
    """The three moments of one rank."""
    walk = _Walk(run)
    moments = [
        _most(walk.loss()),
        _most(walk.backward()),
        _most(walk.end()),
    ]
    return Memory([moment for moment in moments if moment is not None], gpu=run.place.gpu)


def _most(moments: Iterator[Moment]) -> Moment | None:
    return max(moments, key=lambda moment: moment.total, default=None)


def block_costs(run: Setup, stage: Stage) -> list[Cost]:
    """Activation bytes of each block of a stage; equal blocks are walked once.

    Raises:
        ConfigError: if a block does not say what it keeps.
    """
    found: dict[tuple[object, ...], Cost] = {}
    costs: list[Cost] = []
    _, _, dim = stage.model.stage_shape(1, 1)
    recompute = run.recompute
    for i, block in enumerate(stage.model.blocks()):
        checkpointed = i % recompute.every_n_blocks == 0
        mode = recompute.mode if checkpointed else "none"
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        key = (type(block), mode, shapes)
        if key not in found:
            tape = Tape(run.place)
            x = tape.stream(dim)
            found[key] = tape.cost(
                x,
                record(block, tape, x),
                mode,
                recompute.save_every_n_matmuls,
                recompute.memory_budget,
                frees_gradients=run.in_backward and not run.sharded,
            )
        costs.append(found[key])
    return costs


class _Walk:
    """A step of one rank, unit by unit, as FSDP2 allocates and frees.

    With ``N`` ranks that shard: a unit's all-gather fills one flat buffer, which is copied out into the parameters. In the
    forward the buffer stays until the next unit's is filled; in the backward the next unit's is filled while this one
    computes. A unit's gradients are copied into a flat buffer in the reduced type, which stays until the next unit's.

    Args:
        run: the rank.
    """

    def __init__(self, run: Setup) -> None:
        self.run = run
        self.b = run.place.itemsize
        self.costs = [block_costs(run, stage) for stage in run.stages]
        shards = sum(unit.shard for unit in run.units)
        self.static = {
            "parameters": shards * run.param_itemsize,
            "optimizer": sum(unit.optimizer for unit in run.units),
        }
        self.last = run.stages[-1]
        """The stage that has the head, if this rank has it; the others' activations lie there while it works."""
        self.tied = bool(self.last.model.shared_parameters()) and not self.last.edges

    def loss(self) -> Iterator[Moment]:
        """Forward and backward of the head, when all activations are kept."""
        stage, costs = self.last, self.costs[-1]
        head: Head | None = getattr(
            stage.model, "head", None
        )  # only in the last stage of a pipeline
        if head is None or not costs:
            return
        tape = Tape(self.run.place)
        x = tape.stream(stage.model.stage_shape(1, 1)[-1])
        end = tape.cost(x, stage.model.record_end(tape, x))
        kept = self._kept_by_others() + self._kept(len(costs)) + end.kept
        whole = end.stream * (self.run.place.sequence_shards > 1) * self.run.place.sequence_shards
        forward, backward = head.loss_bytes(self.run.place)
        unit = stage.edges.get("head")
        gathered = self._gathered_after_forward(stage) + (self._whole(unit) if unit else 0)
        buffer = self._buffer(unit) if unit else 0
        accumulated = self._accumulated()
        yield self._moment(
            "loss",
            "the head's loss",
            accumulated,
            kept + end.stream + whole,
            forward,
            gathered,
            buffer,
        )
        yield self._moment(
            "loss", "the head's backward", accumulated, kept + whole, backward, gathered, 0
        )
        if unit and self.run.sharded:
            yield self._moment(
                "loss",
                "the reduction of the head",
                accumulated,
                kept + end.stream,
                0,
                gathered - self._whole(unit),
                self._reducing(unit),
            )

    def backward(self) -> Iterator[Moment]:
        """Backward of each block, with all before it still kept."""
        stage, costs = self.last, self.costs[-1]
        done = [stage.edges["head"]] if "head" in stage.edges else []
        # A tied table's gradient from the head waits for the one from the embedding.
        others = self._kept_by_others() + self.tied * self.b * stage.rest.gathered
        for i in reversed(range(len(costs))):
            unit, cost = stage.blocks[i], costs[i]
            kept = others + self._kept(i)
            before = stage.blocks[i - 1] if i else stage.edges.get("embedding")
            gathered = self._gathered_in_backward(stage, i)
            prefetched = self._buffer(before) if before and self._frees() else 0
            held_back = self._reduction(done[-1]) if done else 0
            gradients = self._reduced(done) + self._accumulated(done)
            when = f"the backward of block {i}"
            yield self._moment(
                "backward",
                when,
                gradients,
                kept + cost.backward,
                0,
                gathered,
                prefetched + held_back,
            )
            if self.run.sharded:
                yield self._moment(
                    "backward",
                    f"the reduction of block {i}",
                    gradients,
                    kept + cost.stream,
                    0,
                    gathered - self._whole(unit),
                    prefetched + self._reducing(unit),
                )
            done.append(unit)

    def end(self) -> Iterator[Moment]:
        """Gradient of the embedding, and the optimizer's step."""
        stage, run = self.last, self.run
        embedding = stage.edges.get("embedding", stage.rest)
        done = [*stage.blocks, *(u for n, u in stage.edges.items() if n != "embedding")]
        gradients = self._reduced(done) + self._accumulated(done)
        stream = self.costs[-1][0].stream if self.costs[-1] else 0
        whole = self._whole(embedding)
        if "embedding" in stage.edges:
            last = self._reduction(stage.blocks[0]) if stage.blocks else 0
            yield self._moment(
                "update",
                "the embedding's gradient",
                gradients,
                stream + self.b * embedding.gathered,
                0,
                whole,
                last,
            )
        elif self.tied:  # its two gradients meet, and their sum
            yield self._moment(
                "update",
                "the tied table's gradient",
                gradients,
                stream + 3 * self.b * embedding.gathered,
                0,
                whole,
                self._reduction(stage.blocks[0]) if stage.blocks else 0,
            )
        if run.sharded:
            yield self._moment(
                "update", "the last reduction", gradients, 0, 0, 0, self._reducing(embedding)
            )
        everything = 0 if run.in_backward else self._gradients(run.units)
        update = 0 if run.in_backward else max(unit.update for unit in run.units)
        yield self._moment("update", "the optimizer's step", everything, 0, 0, 0, update)

    def _moment(
        self,
        name: str,
        when: str,
        gradients: int,
        activations: int,
        logits: int,
        gathered: int,
        buffers: int,
    ) -> Moment:
        held = {
            **self.static,
            "gradients": gradients,
            "activations": activations,
            "logits": logits,
            "gathered": gathered,
            "buffers": buffers,
        }
        return Moment(name, when, {kind: held[kind] for kind in KINDS})

    def _kept_by_others(self) -> int:
        """Activations of other micro-batches and stages."""
        kept = sum(stage.model.shared_bytes(self.run.place) for stage in self.run.stages)
        for stage, costs in zip(self.run.stages, self.costs, strict=True):
            passes = stage.in_flight - (stage is self.last)
            away = costs[:-1] if self._offloads() else []
            kept += max(0, passes) * sum(cost.kept for cost in costs[len(away) :])
        return kept

    def _offloads(self) -> bool:
        """Whether what blocks keep waits in the host's memory; on a CPU that is the same."""
        return self.run.recompute.offload and self.run.place.gpu

    def _kept(self, n_blocks: int) -> int:
        """Activations of the first blocks of the last stage on the device.

        Of those that are offloaded it is the last one's: on its way out while the next computes, or back before its turn.
        """
        costs = self.costs[-1]
        last_stays = costs[-1].kept if n_blocks == len(costs) else 0
        if not self._offloads():
            return sum(cost.kept for cost in costs[:n_blocks])
        waiting = costs[: min(n_blocks, len(costs) - 1)]
        return last_stays + (waiting[-1].kept if waiting else 0)

    def _frees(self) -> bool:
        """Whether blocks free their gathered parameters after the forward."""
        return self.run.sharded and self.run.reshard

    def _whole(self, unit: Unit) -> int:
        """Bytes of a unit's gathered parameters."""
        return self.b * unit.gathered if self.run.sharded else 0

    def _buffer(self, unit: Unit) -> int:
        """Bytes of the flat buffer of a unit's all-gather."""
        return self.b * unit.gathered if self.run.sharded and unit.gathered > unit.shard else 0

    def _reduction(self, unit: Unit) -> int:
        """Bytes of the flat buffer of a unit's gradients, whole."""
        return self.run.reduce_itemsize * unit.gathered if self.run.sharded else 0

    def _reducing(self, unit: Unit) -> int:
        """Most bytes while a unit's gradients are reduced: copied in, reduced, then in the parameter's type and used up.

        Of several ranks, FSDP forgets the gradient of the last parameter, as it was before the reduction, at the end only.
        """
        run, alone = self.run, unit.gathered == unit.shard
        whole, shard = self._reduction(unit), run.reduce_itemsize * unit.shard
        copied_in = whole + (self.b * unit.gathered if run.micro_batches == 1 else 0)
        last = self.b * unit.last if run.micro_batches == 1 and not alone else 0
        reduced = whole + shard + (whole if alone else last)
        cast = run.param_itemsize * unit.shard if run.param_itemsize != run.reduce_itemsize else 0
        own = cast or shard
        stored = max(shard + cast, own + unit.update if run.in_backward else 0)
        return max(copied_in, reduced, whole + last + stored)

    def _other_stages_gathered(self) -> int:
        """Bytes of gathered parameters of the rank's other stages, as far as the schedule holds them at once."""
        if not self.run.gathers_stages:
            return 0
        others = sorted(
            sum(self._whole(unit) for unit in (*stage.blocks, *stage.edges.values(), stage.rest))
            for stage in self.run.stages
            if stage is not self.last
        )
        return sum(others[-(STAGES_GATHERED - 1) :])

    def _gathered_after_forward(self, stage: Stage) -> int:
        """Bytes of gathered parameters between forward and backward: of the last block and the rest, or of all."""
        if self._frees():
            last = self._whole(stage.blocks[-1]) if stage.blocks else 0
            return last + self._whole(stage.rest)
        edges = [unit for name, unit in stage.edges.items() if name != "head"]
        own = sum(self._whole(unit) for unit in (*stage.blocks, *edges, stage.rest))
        return own + self._other_stages_gathered()

    def _gathered_in_backward(self, stage: Stage, block: int) -> int:
        """Bytes of gathered parameters while ``block`` goes back."""
        if self._frees():
            return self._whole(stage.blocks[block]) + self._whole(stage.rest)
        embedding = [stage.edges["embedding"]] if "embedding" in stage.edges else []
        if self.run.gathers_stages:  # which the schedule frees as wholes
            own = (*stage.blocks, *stage.edges.values(), stage.rest)
        else:
            own = (*stage.blocks[: block + 1], *embedding, stage.rest)
        return sum(self._whole(unit) for unit in own) + self._other_stages_gathered()

    def _gradients(self, units: Sequence[Unit]) -> int:
        return self.run.param_itemsize * sum(unit.trainable for unit in units)

    def _reduced(self, done: Sequence[Unit]) -> int:
        """Gradients of the units that have gone back, as shards; none with the optimizer in the backward."""
        return 0 if self.run.in_backward else self._gradients(done)

    def _accumulated(self, done: Sequence[Unit] = ()) -> int:
        """Gradients of the micro-batches before, which FSDP keeps whole, in float32, until the last one's are reduced."""
        run = self.run
        if run.micro_batches == 1 or not run.sharded:
            return 0
        units = sum(unit.gathered for unit in run.units) - sum(unit.gathered for unit in done)
        return run.reduce_itemsize * units
