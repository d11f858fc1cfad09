"""Pipeline parallelism: where a model is cut into stages, which rank holds which, and in which order they run."""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.models.model import Model, ParameterCounts
from torchtitan.parallel.degrees import divisors
from torchtitan.parallel.pipeline_schedule import (
    SINGLE,
    SPLITS_BACKWARD,
    V_SHAPED,
    Order,
    bubble,
    draw,
    make_order,
    read_order,
    simulate,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Pipeline(Configurable):
    """The cut of one model over ``pp`` ranks.

    Args:
        config: its settings.
        pp: number of ranks along the pipeline.
        n_blocks: the model's blocks.

    Attributes:
        rank_of_stage: for each stage, in the order of the forward, the rank that holds it.
        blocks: for each stage, the blocks in it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """How blocks are shared out to the ranks of ``pp``; without effect at pp=1."""

        OPERATIONAL = frozenset(
            {
                "schedule",
                "csv",
                "stages_per_rank",
                "blocks_per_stage",
                "stages_begin_with",
                "embedding_layers",
                "head_layers",
            }
        )

        schedule: Literal[
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
            "CSV",
        ] = "1F1B"
        """Order of forwards and backwards; docs/parallelism/pipeline.md compares them. CSV takes it from `csv`."""
        csv: str = ""
        """Path of a schedule: a line a rank, actions such as 0F1 (stage, one of F B I W, micro-batch) between commas.
        Needs schedule=CSV."""
        stages_per_rank: int | None = None
        """Stages that a rank holds: more make the idle time shorter and the messages more. None means 1 for GPipe
        and 1F1B, 2 for the other schedules, and what the file has for CSV."""
        blocks_per_stage: tuple[int, ...] | None = None
        """Blocks in each stage, in the order of the forward; their sum is the model's number of blocks. None means
        balanced."""
        stages_begin_with: tuple[str, ...] | None = None
        """The same by names: the block that each stage after the first begins with, such as layers.7 layers.16 layers.25."""
        embedding_layers: int = 1
        """How many blocks the embedding weighs as when the split is balanced."""
        head_layers: int = 1
        """How many blocks the final norm and the head weigh as when the split is balanced."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("embedding_layers", "head_layers"):
                if getattr(self, name) < 0:
                    yield Problem(name, getattr(self, name), "is negative", "set 0 or more")
            if (self.schedule == "CSV") != bool(self.csv):
                yield Problem(
                    "csv",
                    self.csv,
                    f"does not go with schedule={self.schedule}",
                    "set schedule=CSV and a path here, or another schedule and no path",
                )
            per_rank, wanted = self.stages_per_rank, _stages_wanted(self.schedule)
            if per_rank is not None and per_rank < 1:
                yield Problem("stages_per_rank", per_rank, "is not positive", "set 1 or more")
            elif per_rank is not None and wanted is not None and per_rank != wanted:
                yield Problem(
                    "stages_per_rank",
                    per_rank,
                    f"does not go with schedule={self.schedule}, which needs exactly {wanted}",
                    f"set {wanted}, or leave it None",
                )
            if self.blocks_per_stage is not None and min(self.blocks_per_stage, default=0) < 1:
                yield Problem(
                    "blocks_per_stage",
                    self.blocks_per_stage,
                    "has a stage without a block",
                    "give every stage at least 1",
                )
            yield from self._check_names()

        def _check_names(self) -> Iterator[Problem]:
            """Yield what is wrong with `stages_begin_with` whatever the model."""
            names = self.stages_begin_with
            if names is None:
                return
            if self.blocks_per_stage is not None:
                yield Problem(
                    "stages_begin_with",
                    names,
                    f"and blocks_per_stage={self.blocks_per_stage} both say where the model is cut",
                    "set one of them to None",
                )
            numbers = [_number_of(name) for name in names]
            if None in numbers or numbers != sorted(set(numbers), key=lambda n: n or 0):
                yield Problem(
                    "stages_begin_with",
                    names,
                    "are not blocks in the order of the forward",
                    "write such as layers.7 layers.16, rising",
                )

        def split(self, n_blocks: int) -> tuple[int, ...] | None:
            """Blocks in each stage of a model with ``n_blocks``, where the config says so; None for balanced."""
            if self.stages_begin_with is None:
                return self.blocks_per_stage
            starts = [0, *(_number_of(name) or 0 for name in self.stages_begin_with), n_blocks]
            return tuple(end - start for start, end in pairwise(starts))

        def check_cut(self, pp: int, n_blocks: int) -> Iterator[Problem]:
            """Yield a problem if ``n_blocks`` blocks cannot be cut as the config says."""
            if pp < 2 or any(True for _ in self.check()):
                return
            if self.schedule == "CSV":
                found = list(self._check_file(pp))
                yield from found
                if found:
                    return
            n_stages = self.n_stages(pp)
            if (
                n_stages > n_blocks >= pp
            ):  # `Model.Config.check_degrees` tells of more ranks than blocks
                most = f"stages_per_rank to {n_blocks // pp} or less"
                if _stages_wanted(self.schedule) is not None:
                    most = "a schedule of 1 stage a rank (GPipe, 1F1B)"
                yield Problem(
                    "stages_per_rank",
                    self.stages_per_rank,
                    f"makes pp={pp} * {n_stages // pp} = {n_stages} stages of {n_blocks} blocks, and each needs one",
                    f"set {most}, or pp to {n_blocks * pp // n_stages} or less",
                )
            split = self.split(n_blocks)
            if (
                n_stages <= n_blocks
                and split is not None
                and (len(split) != n_stages or sum(split) != n_blocks or min(split) < 1)
            ):
                stages = f"there are {n_stages} stages (pp={pp} * {n_stages // pp}) and the model has {n_blocks} blocks"
                if self.stages_begin_with is not None:
                    yield Problem(
                        "stages_begin_with",
                        self.stages_begin_with,
                        f"makes stages of {', '.join(map(str, split))} blocks, but {stages}",
                        f"name {n_stages - 1} blocks, the last at most number {n_blocks - 1}, or None for a balanced split",
                    )
                    return
                yield Problem(
                    "blocks_per_stage",
                    split,
                    f"has {len(split)} stages of {sum(split)} blocks in all, but {stages}",
                    f"set {n_stages} numbers with the sum {n_blocks}, or None for a balanced split",
                )

        def check_rows(self, pp: int, rows: int, micro_batch_rows: int | None) -> Iterator[Problem]:
            """Yield a problem if the rows of a data rank do not make micro-batches as the schedule needs them.

            Args:
                pp: ranks along the pipeline.
                rows: of a data rank, in a step.
                micro_batch_rows: see `Training.Config`; it divides ``rows``.
            """
            if pp < 2 or any(True for _ in self.check()):
                return
            fitting = [n for n in divisors(rows) if self._takes(pp, rows // n) is None]
            if micro_batch_rows is None and fitting:
                return
            n = rows // (micro_batch_rows or 1)
            reason = self._takes(pp, n)
            if reason is not None:
                remedy = (
                    f"choose one of {fitting}" if fitting else "set more training.global_batch_rows"
                )
                yield Problem(
                    "micro_batch_rows",
                    micro_batch_rows,
                    f"makes {n} micro-batches of the {rows} rows of a data rank, but "
                    f"parallelism.pipeline.schedule={self.schedule} with pp={pp} {reason}",
                    remedy,
                )

        def micro_batch_rows(self, pp: int, rows: int) -> int:
            """Rows of a micro-batch where the run does not say: the most that leave every stage one to work on.

            Args:
                pp: ranks along the pipeline; without one, all rows are one micro-batch.
                rows: of a data rank, in a step.
            """
            if pp < 2:
                return rows
            fitting = [n for n in divisors(rows) if self._takes(pp, rows // n) is None]
            busy = [n for n in fitting if rows // n >= self.n_stages(pp)]
            return max(busy) if busy else min(fitting, default=1)

        def n_stages(self, pp: int) -> int:
            """Number of stages over all ranks.

            Raises:
                ConfigError: if it stands in a file that cannot be read.
            """
            if self.schedule == "CSV":
                return 1 + max(action.stage for line in read_order(self.csv) for action in line)
            return pp * (self.stages_per_rank or _stages_wanted(self.schedule) or 2)

        def order(self, pp: int, n_microbatches: int) -> Order:
            """What each rank does, in order.

            Raises:
                ConfigError: if it stands in a file that cannot be read.
            """
            if self.schedule == "CSV":
                return read_order(self.csv)
            return make_order(self.schedule, pp, self.n_stages(pp) // pp, n_microbatches)

        def build(self, *, pp: int, n_blocks: int) -> "Pipeline":
            """Cut a model of ``n_blocks`` blocks over ``pp`` ranks."""
            return Pipeline(self, pp, n_blocks)

        def _takes(self, pp: int, n_microbatches: int) -> str | None:
            """None if the schedule runs with so many micro-batches, else what it needs."""
            n = n_microbatches
            if self.schedule == "CSV":
                in_file = 1 + max(a.microbatch for line in read_order(self.csv) for a in line)
                return None if n == in_file else f"is of exactly {in_file}"
            n_stages = self.n_stages(pp)
            if self.schedule in ("1F1B", "DualPipeV") and n < n_stages:
                return f"needs at least {n_stages}, one a stage"
            rounds = max(1, n // pp)
            if self.schedule.startswith("Interleaved") and n % rounds:
                return f"runs them in {rounds} equal rounds, so it needs a multiple of {rounds}"
            return None

        def _check_file(self, pp: int) -> Iterator[Problem]:
            """Yield the first thing wrong with the schedule in the file."""
            try:
                order = read_order(self.csv)
                reason = _flaw(order, pp)
                if reason is None:
                    simulate(order)
            except ConfigError as error:
                reason = str(error)
            if reason is not None:
                yield Problem("csv", self.csv, reason, "correct the file")
                return
            per_rank = self.n_stages(pp) // pp
            if self.stages_per_rank not in (None, per_rank):
                yield Problem(
                    "stages_per_rank",
                    self.stages_per_rank,
                    f"is not what {self.csv} has",
                    f"set {per_rank}, or leave it None",
                )

    def __init__(self, config: Config, pp: int, n_blocks: int) -> None:
        self.config = config
        n_stages = config.n_stages(pp)
        self.rank_of_stage = _ranks(config, pp, n_stages)
        counts = config.split(n_blocks) or balanced(
            n_blocks, n_stages, first=config.embedding_layers, last=config.head_layers
        )
        starts = [sum(counts[:stage]) for stage in range(n_stages)]
        self.blocks = [
            range(start, start + count) for start, count in zip(starts, counts, strict=True)
        ]

    @property
    def n_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.blocks)

    @property
    def gathers_stages(self) -> bool:
        """Whether the schedule itself gathers a stage's sharded parameters before it is used and frees them after."""
        return self.config.schedule not in SINGLE

    def stages_of(self, rank: int) -> list[int]:
        """The stages on a rank, rising."""
        return [stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank]


class ModelParts(Model):
    """The stages that a rank holds, as one model under the original names.

    Whoever walks it (``named_parameters``, ``modules``, ``train``) meets this rank's parameters, each under the name
    that it has in the whole model. A copy of a parameter that belongs to another stage (`Model.shared_parameters`)
    is not among them: it is neither stepped nor counted nor saved, see `copies`.

    Args:
        whole: the uncut model, on the meta device: counts are asked of it.
        parts: this rank's stages, in the order of the forward.
        stages: their numbers.
        pipeline: the cut.
        mesh: the axis of the pipeline.
        dtype: of the hidden states between stages.
        sequence_shards: into how many pieces the tokens of a row are cut between stages (sequence parallelism).
    """

    def __init__(
        self,
        whole: Model,
        parts: Sequence[Model],
        stages: Sequence[int],
        pipeline: Pipeline,
        mesh: "DeviceMesh",
        *,
        dtype: torch.dtype,
        sequence_shards: int = 1,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self._registered = nn.ModuleList(parts)
        self.stages = list(stages)
        self.pipeline = pipeline
        self._whole = (whole,)  # in a tuple, so that it is no submodule
        self._mesh = mesh
        self._dtype = dtype
        self._sequence_shards = sequence_shards

    @property
    def batch_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - read-only here
        """See `Model.batch_fields`."""
        return self._whole[0].batch_fields

    @property
    def copies(self) -> dict[str, nn.Parameter]:
        """Parameters of these stages that are copies of another stage's, by their name in `shared_parameters`."""
        shared = self.shared_parameters()
        found: dict[str, nn.Parameter] = {}
        for part in self.parts:
            own = dict(part.named_parameters())
            found |= {n: own[n] for n, owner in shared.items() if n in own and owner not in own}
        return found

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Every module of every stage, under the name that it has in the whole model."""
        memo = set() if memo is None else memo
        yield prefix, self
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, without the `copies`."""
        copies = set(self.copies.values())
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if parameter not in copies:
                yield name, parameter

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the pipeline."""
        return self._mesh.get_group()

    def names_elsewhere(self) -> Iterable[str]:
        """See `Model.names_elsewhere`."""
        own = {name for name, _ in self.named_parameters()}
        return [name for name, _ in self._whole[0].named_parameters() if name not in own]

    def keep(self, blocks: range, first: bool, last: bool) -> None:
        """Refuse: it is cut already."""
        raise TypeError(f"the model is cut into stages {self.stages}; cut the whole one")

    def blocks(self) -> Sequence[nn.Module]:
        """See `Model.blocks`."""
        return [block for part in self.parts for block in part.blocks()]

    def edge_units(self) -> Sequence[nn.Module]:
        """See `Model.edge_units`."""
        return [unit for part in self.parts for unit in part.edge_units()]

    def shared_parameters(self) -> Mapping[str, str]:
        """See `Model.shared_parameters`."""
        return self._whole[0].shared_parameters()

    def parameter_counts(self) -> ParameterCounts:
        """Those of the whole model."""
        return self._whole[0].parameter_counts()

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """Those of the whole model."""
        return self._whole[0].flops_per_token(seq_len, causal=causal)

    def stage_shape(self, rows: int, seq_len: int) -> tuple[int, ...]:
        """See `Model.stage_shape`; the part of this rank."""
        return self._whole[0].stage_shape(rows, seq_len // self._sequence_shards)

    def empty_hidden_states(self, tokens: torch.Size, device: torch.device | str) -> Tensor:
        """Room for what one stage sends to the next for a micro-batch of shape ``tokens``, ``(B, S)``."""
        rows, seq_len = tokens
        return torch.empty(self.stage_shape(rows, seq_len), dtype=self._dtype, device=device)

    def sum_over_stages(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` up over the ranks of the pipeline, in place, and return it."""
        dist.all_reduce(tensor, group=self.group)
        return tensor


def balanced(n_blocks: int, n_stages: int, *, first: int, last: int) -> tuple[int, ...]:
    """Deal blocks to stages so that the heaviest stage is as light as it can be; each gets at least one.

    What is left over goes to later stages, which hold fewer micro-batches at a time.

    Args:
        n_blocks: at least ``n_stages``.
        n_stages: number of stages.
        first: what the first stage holds besides, in blocks.
        last: what the last stage holds besides, in blocks.
    """
    counts = [1] * n_stages
    extra = [0] * n_stages
    extra[0] += first
    extra[-1] += last
    for _ in range(n_blocks - n_stages):
        lightest = min(range(n_stages), key=lambda s: (counts[s] + extra[s], -s))
        counts[lightest] += 1
    return tuple(counts)


def pipeline_picture(
    config: Pipeline.Config, pp: int, n_blocks: int, n_microbatches: int, *, width: int = 120
) -> str:
    """The pipeline as text: which rank holds which blocks, the order of the work in time, and the idle share.

    Args:
        config: of the pipeline.
        pp: ranks along it.
        n_blocks: the model's blocks.
        n_microbatches: micro-batches of a step.
        width: characters of a line; what comes later is cut off.
    """
    pipeline = config.build(pp=pp, n_blocks=n_blocks)
    timed = simulate(config.order(pp, n_microbatches))
    held = [
        f"stage {stage}: rank {rank}, "
        + ("embedding, " if stage == 0 else "")
        + f"blocks {blocks.start}-{blocks.stop - 1}"
        + (", norm and head" if stage == pipeline.n_stages - 1 else "")
        for stage, (rank, blocks) in enumerate(
            zip(pipeline.rank_of_stage, pipeline.blocks, strict=True)
        )
    ]
    title = (
        f"{config.schedule}, {pipeline.n_stages} stages on {pp} ranks, {n_microbatches} micro-batches; idle "
        f"{bubble(timed):.0%} of the time if all stages are equal and a backward takes two forwards"
    )
    legend = "0F1 = stage 0, forward of micro-batch 1; B backward, I and W its halves (inputs, weights); . idle"
    return "\n".join([title, *held, draw(timed, width=width), legend])


def splits_backward(config: Pipeline.Config) -> bool:
    """Whether gradients of inputs and of weights are computed apart, so that a fused backward runs twice."""
    if config.schedule == "CSV":
        return any(action.kind == "W" for line in read_order(config.csv) for action in line)
    return config.schedule in SPLITS_BACKWARD


def _number_of(block: str) -> int | None:
    """The number in a block's name; None if there is none, or it is that of the first."""
    found = re.search(r"\.(\d+)$", block)
    return int(found[1]) or None if found else None


def _stages_wanted(schedule: str) -> int | None:
    """The only number of stages a rank that a schedule takes; None if it takes several."""
    if schedule in SINGLE:
        return 1
    return 2 if schedule in V_SHAPED else None


def _ranks(config: Pipeline.Config, pp: int, n_stages: int) -> list[int]:
    """For each stage, the rank that holds it."""
    if config.schedule == "CSV":
        holder = {a.stage: rank for rank, line in enumerate(read_order(config.csv)) for a in line}
        return [holder[stage] for stage in range(n_stages)]
    if config.schedule in V_SHAPED:
        return [min(stage, n_stages - 1 - stage) for stage in range(n_stages)]
    return [stage % pp for stage in range(n_stages)]


def _flaw(order: Order, pp: int) -> str | None:
    """What is wrong with a schedule of one's own, its order in time aside; None if nothing is."""
    if len(order) != pp:
        return f"has {len(order)} lines, one a rank, but pp={pp}"
    actions = [action for line in order for action in line]
    n_stages = 1 + max((a.stage for a in actions), default=-1)
    n_microbatches = 1 + max((a.microbatch for a in actions), default=-1)
    stages = [{a.stage for a in line} for line in order]
    if any(len(held) * pp != n_stages for held in stages) or len(set().union(*stages)) != n_stages:
        held = "; ".join(f"rank {rank}: {sorted(s)}" for rank, s in enumerate(stages))
        return f"must give each rank equally many of the stages 0 to {n_stages - 1}, and has {held}"
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            kinds = sorted(
                a.kind for a in actions if a.stage == stage and a.microbatch == microbatch
            )
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                return (
                    f"has {kinds or 'nothing'} for stage {stage} and micro-batch {microbatch}, "
                    "where each needs F and B, or F, I and W, once"
                )
    return None
