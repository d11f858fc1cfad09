"""Who works together: the degrees of parallelism, the process group, and the one object that owns all meshes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan import torch_api
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.environment import local_rank, world_size
from torchtitan.parallel.context import ContextParallel
from torchtitan.parallel.degrees import Degrees, divisors, nearest_fitting
from torchtitan.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh(Configurable):
    """The ranks as a grid with named axes; nothing else makes a device mesh."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Degrees of parallelism; their product is the number of ranks."""

        OPERATIONAL = frozenset(
            {
                "dp_replicate",
                "dp_shard",
                "cp",
                "tp",
                "pp",
                "ep",
                "sequence_parallel",
                "async_tp",
                "context",
                "pipeline",
                "reshard_after_forward",
                "timeout_s",
            }
        )

        dp_replicate: int = 1
        """Copies of the parameters, whose gradients are all-reduced. With dp_shard=1 this is plain data parallel
        (DDP); with both above 1 it is HSDP. -1 means what is left."""
        dp_shard: int = -1
        """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1 means what is left."""
        cp: int = 1
        """Context parallel: ranks that share the tokens of a row."""
        tp: int = 1
        """Tensor parallel: ranks that share each matmul."""
        pp: int = 1
        """Pipeline parallel: groups of ranks that hold different blocks."""
        pipeline: Pipeline.Config = field(default_factory=Pipeline.Config)
        """How a model is cut over `pp`, and in which order the stages work."""
        ep: int = 1
        """Expert parallel: ranks that hold different experts, borrowed from dp_shard * cp * tp."""
        sequence_parallel: bool = True
        """With tp above 1: keep the residual stream divided over the tp ranks along the sequence. Same traffic, activations
        between the matmuls 1/tp as large."""
        async_tp: bool = False
        """Let the compiler cut the gathers and scatters of tp into pieces that overlap with their matmuls. Needs compile,
        sequence_parallel and GPUs that reach each other's memory (NVLink)."""
        context: ContextParallel.Config = field(default_factory=ContextParallel.Config)
        """How the ranks of cp attend to each other's tokens."""
        reshard_after_forward: bool = True
        """Free a block's gathered parameters between its forward and its backward; False saves one all-gather a block
        for the memory of the whole model. Pipeline schedules other than GPipe and 1F1B gather and free whole stages
        themselves; there it is without effect."""
        timeout_s: float = 300.0
        """Seconds after which a collective that some rank does not join ends the run with an error."""

        def resolve(self, world_size: int) -> Degrees:
            """The degrees with -1 filled in; their product is ``world_size`` if the config is sound."""
            known = max(1, self.pp * self.cp * self.tp)
            replicate, shard = self.dp_replicate, self.dp_shard
            if shard == -1:
                shard = max(1, world_size // max(1, known * replicate))
            elif replicate == -1:
                replicate = max(1, world_size // max(1, known * shard))
            return Degrees(
                pp=self.pp,
                dp_replicate=replicate,
                dp_shard=shard,
                cp=self.cp,
                tp=self.tp,
                ep=self.ep,
                ulysses=self.cp if self.context.kind == "ulysses" else 1,
                sequence_shards=self.tp if self.sequence_parallel else 1,
            )

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
                value = getattr(self, name)
                inferable = name.startswith("dp")
                if value < 1 and not (inferable and value == -1):
                    remedy = "set 1 or more" + (", or -1 to infer it" if inferable else "")
                    yield Problem(name, value, "is not a degree", remedy)
            if self.dp_replicate == self.dp_shard == -1:
                yield Problem(
                    "dp_shard", -1, "and dp_replicate=-1 cannot both be inferred", "set one of them"
                )
            if self.async_tp and (self.tp == 1 or not self.sequence_parallel):
                yield Problem(
                    "async_tp",
                    True,
                    f"overlaps gathers and scatters, which tp={self.tp} with sequence_parallel={self.sequence_parallel} "
                    "does not have",
                    "set tp above 1 and sequence_parallel=True, or async_tp=False",
                )
            if self.timeout_s <= 0:
                yield Problem(
                    "timeout_s", self.timeout_s, "is not positive", "set seconds such as 300"
                )

        def check_world(self, world_size: int) -> Iterator[Problem]:
            """Yield a problem if the degrees do not multiply to ``world_size``."""
            if any(True for _ in self.check()):
                return
            degrees = self.resolve(world_size)
            if degrees.world != world_size:
                fitting = "; or ".join(d.equation() for d in nearest_fitting(degrees, world_size))
                yield Problem(
                    "dp_shard",
                    self.dp_shard,
                    f"makes {degrees.equation()} = {degrees.world} ranks, but the world size is {world_size}",
                    f"set {fitting} (dp_shard=-1 infers it)",
                )
            elif (degrees.dp_shard * degrees.cp * degrees.tp) % degrees.ep:
                lendable = degrees.dp_shard * degrees.cp * degrees.tp
                yield Problem(
                    "ep",
                    degrees.ep,
                    f"does not divide the {lendable} ranks of dp_shard={degrees.dp_shard} * cp={degrees.cp} * "
                    f"tp={degrees.tp} that it borrows",
                    f"choose one of {divisors(lendable)}",
                )

        def check_seq_len(self, seq_len: int) -> Iterator[Problem]:
            """Yield a problem if rows of ``seq_len`` tokens cannot be spread over the ranks."""
            unfit = list(self.context.check_seq_len(seq_len, self.cp))
            yield from unfit
            if (
                not unfit
                and self.sequence_parallel
                and self.tp > 1
                and seq_len % (self.cp * self.tp)
            ):
                yield Problem(
                    "seq_len",
                    seq_len,
                    f"cannot be cut into parallelism.cp={self.cp} * tp={self.tp} equal parts, as sequence_parallel does",
                    f"set a multiple of {self.cp * self.tp}, tp to one of {divisors(seq_len // self.cp)}, or "
                    "parallelism.sequence_parallel to False",
                )

        def build(self, device: torch.device) -> "Mesh":
            """Join the process group, which spans all ranks, and make the mesh."""
            return Mesh(self, device)

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.owns_process_group = not dist.is_initialized()
        if self.owns_process_group:
            _init_process_group(device, config.timeout_s)
        try:
            self._make_axes(config)
        except BaseException:
            self.abandon()
            raise

    def _make_axes(self, config: Config) -> None:
        """Name the ranks of the process group, and make the axes."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.degrees = d = config.resolve(self.world_size)
        """Ranks along each axis."""
        self.context = config.context
        self.sequence_parallel = d.sequence_shards > 1
        """Whether the tp ranks divide the residual stream's tokens among them."""
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._timeout = timedelta(seconds=config.timeout_s)
        # The same ranks, factored in several ways; tp is the innermost axis in all of them.
        dense = self._factor(pp=d.pp, dp_replicate=d.dp_replicate, fsdp=d.fsdp, tp=d.tp)
        expert = self._factor(pp=d.pp, dp_replicate=d.dp_replicate, efsdp=d.efsdp, ep=d.ep)
        grid = self._factor(pp=d.pp, data=d.data, cp=d.cp, tp=d.tp)
        loss = self._factor(pp=d.pp, loss=d.data * d.cp, tp=d.tp)
        copies = ("dp_replicate",) if d.dp_replicate > 1 else ()
        self.fsdp: DeviceMesh = dense[*copies, "fsdp"]
        """Of dense parameters: (dp_replicate, fsdp), fsdp being dp_shard * cp; or fsdp alone where there is one copy,
        which saves an all-reduce of each gradient over one rank."""
        self.tp: DeviceMesh = dense["tp"]
        self.pp: DeviceMesh = dense["pp"]
        self.cp: DeviceMesh = grid["cp"]
        self.ep: DeviceMesh = expert["ep"]
        self.expert_fsdp: DeviceMesh = expert[*copies, "efsdp"]
        """Of expert parameters, besides their split over ``ep``."""
        self.loss: DeviceMesh = loss["loss"]
        """Ranks whose loss sums add up: they hold different tokens."""
        self.dp_rank: int = grid.get_local_rank("data")
        """This rank's number among the data ranks; its cp, tp and pp peers have the same rows."""
        fake = dist.get_backend() == "fake"  # a dry run
        self.control: Any = dist.new_group(
            backend="fake" if fake else "gloo", timeout=self._timeout
        )
        """CPU group of all ranks, for decisions that the hosts take together."""

    def _factor(self, **axes: int) -> "DeviceMesh":
        """The ranks as a grid with named axes; axes of several factorings that have the same ranks share a group."""
        ranks = torch.arange(self.world_size).view(*axes.values())
        groups = [self._group(ranks.movedim(axis, -1).flatten(0, -2)) for axis in range(ranks.ndim)]
        return torch_api.DeviceMesh.from_group(
            groups, self.device.type, ranks, mesh_dim_names=tuple(axes)
        )

    def _group(self, partition: torch.Tensor) -> dist.ProcessGroup:
        """This rank's of the groups whose members are the rows of ``partition``, which all ranks make together."""
        members = tuple(map(tuple, partition.tolist()))
        if members not in self._groups:
            whole = len(members) == 1
            group: Any = (
                dist.group.WORLD if whole else dist.new_subgroups_by_enumeration(members)[0]
            )
            self._groups[members] = group
        return self._groups[members]

    @property
    def dp_world_size(self) -> int:
        """Number of data ranks: those that get different rows."""
        return self.degrees.data

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add ``tensor`` up over the ranks that hold different tokens, in place, and return it."""
        if self.loss.size() > 1:
            dist.all_reduce(tensor, group=self.loss.get_group())
        return tensor

    def sum_over_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add ``tensor`` up over the ranks that route different tokens, in place, and return it.

        These are the ranks of `sum_over_data` and the tp peers, which route a part of the row each.
        """
        if self.tp.size() > 1:
            dist.all_reduce(tensor, group=self.tp.get_group())
        return self.sum_over_data(tensor)

    def describe(self) -> str:
        """The mesh in words, for the log."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}: {self.degrees.equation()} on {self.device.type}"

    def close(self, *, together: bool) -> None:
        """Leave the process group.

        Args:
            together: all ranks come here, so they may wait for each other. False after an error of this rank alone:
                the others hang in a collective, and it is for the launcher to end them.
        """
        if not (self.owns_process_group and dist.is_initialized()):
            return
        if self.world_size > 1:
            if not together:
                return
            dist.barrier(self.control)  # gloo may abort the slower rank otherwise
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave the process group after an error, while no collective of this rank is under way, and wait for nobody.

        GPUs of several ranks would wait for the others: their group is for the launcher to end.
        """
        if self.owns_process_group and dist.is_initialized():
            alone = dist.get_world_size() == 1
            if alone or self.device.type == "cpu":
                dist.destroy_process_group()


def pick_device(kind: str) -> torch.device:
    """This rank's device.

    Args:
        kind: ``auto`` (a GPU if there is one), ``cuda`` or ``cpu``.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    return torch.device(kind)


def _init_process_group(device: torch.device, timeout_s: float) -> None:
    """Join the group of all ranks: from the launcher's environment, or alone in this process."""
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    device_id = device if device.type == "cuda" else None
    if world_size() > 1:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage] - documented
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=device_id,
        )
