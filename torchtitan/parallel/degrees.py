"""The degrees of parallelism as plain numbers: how many ranks there are along each axis."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks along each axis. The world is their product, ``ep`` aside: it borrows ranks from the others.

    Attributes:
        pp: pipeline stages' groups; the outermost axis.
        dp_replicate: copies of the parameters.
        dp_shard: ranks over which parameters are sharded and rows are dealt.
        cp: ranks that share the tokens of a row; parameters are sharded over them as well.
        tp: ranks that share each matmul; the innermost axis.
        ep: ranks that share a layer's experts, out of dp_shard * cp * tp.
        ulysses: ranks of cp that deal the heads of a layer among them: all of them with that kind, else 1.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    ulysses: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Data ranks: those that get different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which a dense parameter is sharded by FSDP."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which an expert's parameter is sharded by FSDP, besides the experts' own split."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def equation(self) -> str:
        """The product in words, without the axes of one rank: ``pp=2 * dp_shard=4``."""
        axes = {
            name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        }
        shown = [f"{name}={degree}" for name, degree in axes.items() if degree != 1]
        return " * ".join(shown) or "dp_shard=1"


def divisors(number: int) -> list[int]:
    """The divisors of ``number``, rising."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_fitting(wanted: Degrees, world_size: int, limit: int = 3) -> Iterator[Degrees]:
    """Yield the meshes of ``world_size`` ranks that change the fewest axes of ``wanted``, then the least.

    Tensor parallel is never proposed to a mesh that has none.
    """
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    now = [getattr(wanted, name) for name in names]
    found: list[tuple[int, float, list[int]]] = []

    def search(chosen: list[int], left: int) -> None:
        if len(chosen) == len(names) - 1:
            mesh = [*chosen, left]
            changed = [max(a, b) / min(a, b) for a, b in zip(mesh, now, strict=True) if a != b]
            found.append((len(changed), prod(changed), mesh))
            return
        for degree in divisors(left):
            search([*chosen, degree], left // degree)

    search([], world_size)
    fitting = [mesh for mesh in sorted(found) if wanted.tp > 1 or mesh[2][-1] == 1]
    for _, _, mesh in fitting[:limit]:
        yield Degrees(**dict(zip(names, mesh, strict=True)), ep=1)
