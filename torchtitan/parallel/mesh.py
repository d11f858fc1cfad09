"""Who works together: the degrees of parallelism, the process group, and the one object that owns all meshes."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan import torch_api
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.environment import local_rank, world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh(Configurable):
    """The ranks as a grid with named axes; nothing else makes a device mesh."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Degrees of parallelism; their product is the number of ranks."""

        OPERATIONAL = frozenset({"dp_replicate", "dp_shard", "reshard_after_forward", "timeout_s"})

        dp_replicate: int = 1
        """Copies of the parameters, whose gradients are all-reduced. With dp_shard=1 this is plain data parallel
        (DDP); with both above 1 it is HSDP. -1 means what is left."""
        dp_shard: int = -1
        """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1 means what is left."""
        reshard_after_forward: bool = True
        """Free a block's gathered parameters between its forward and its backward; False saves one all-gather a block
        for the memory of the whole model."""
        timeout_s: float = 300.0
        """Seconds after which a collective that some rank does not join ends the run with an error."""

        def resolve(self, world_size: int) -> tuple[int, int]:
            """(dp_replicate, dp_shard) with -1 filled in; their product is ``world_size`` if the config is sound."""
            if self.dp_shard == -1:
                return self.dp_replicate, world_size // max(1, self.dp_replicate)
            if self.dp_replicate == -1:
                return world_size // max(1, self.dp_shard), self.dp_shard
            return self.dp_replicate, self.dp_shard

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("dp_replicate", "dp_shard"):
                if getattr(self, name) < 1 and getattr(self, name) != -1:
                    yield Problem(
                        name,
                        getattr(self, name),
                        "is not a degree",
                        "set 1 or more, or -1 to infer it",
                    )
            if self.dp_replicate == self.dp_shard == -1:
                yield Problem(
                    "dp_shard", -1, "and dp_replicate=-1 cannot both be inferred", "set one of them"
                )
            if self.timeout_s <= 0:
                yield Problem(
                    "timeout_s", self.timeout_s, "is not positive", "set seconds such as 300"
                )

        def check_world(self, world_size: int) -> Iterator[Problem]:
            """Yield a problem if the degrees do not multiply to ``world_size``."""
            if any(True for _ in self.check()):
                return
            replicate, shard = self.resolve(world_size)
            if replicate * shard == world_size:
                return
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            if -1 in (self.dp_replicate, self.dp_shard):
                name = "dp_shard" if self.dp_replicate == -1 else "dp_replicate"
                yield Problem(
                    name,
                    getattr(self, name),
                    f"does not divide the {world_size} ranks",
                    f"choose one of {divisors}",
                )
                return
            yield Problem(
                "dp_shard",
                self.dp_shard,
                f"* dp_replicate={self.dp_replicate} = {replicate * shard} ranks, but the world size is {world_size}",
                f"set dp_shard=-1 to infer it, or (dp_replicate, dp_shard) to one of "
                f"{[(n, world_size // n) for n in divisors]}",
            )

        def build(self, device: torch.device) -> "Mesh":
            """Join the process group, which spans all ranks, and make the mesh."""
            return Mesh(self, device)

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.owns_process_group = not dist.is_initialized()
        if self.owns_process_group:
            _init_process_group(device, config.timeout_s)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dp_replicate, self.dp_shard = config.resolve(self.world_size)
        both: DeviceMesh = torch_api.init_device_mesh(
            device.type,
            (self.dp_replicate, self.dp_shard),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
        self.fsdp: DeviceMesh = both if self.dp_replicate > 1 else both["dp_shard"]
        """Of the parameters: (dp_replicate, dp_shard), or dp_shard alone where there is one copy, which saves an
        all-reduce of each gradient over one rank."""
        timeout = timedelta(seconds=config.timeout_s)
        self.control: Any = dist.new_group(backend="gloo", timeout=timeout)
        """CPU group of all ranks, for decisions that the hosts take together."""

    @property
    def dp_world_size(self) -> int:
        """Number of data ranks: those that get different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """This rank's number among the data ranks."""
        return self.rank

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add ``tensor`` up over the data ranks in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def describe(self) -> str:
        """The mesh in words, for the log."""
        return (
            f"{self.world_size} ranks = dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} "
            f"on {self.device.type}"
        )

    def close(self, *, together: bool) -> None:
        """Leave the process group.

        Args:
            together: all ranks come here, so they may wait for each other. False after an error of this rank alone:
                the others hang in a collective, and it is for the launcher to end them.
        """
        if self.owns_process_group and together and dist.is_initialized():
            if self.world_size > 1:
                dist.barrier(self.control)  # gloo may abort the slower rank otherwise
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
