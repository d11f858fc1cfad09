"""The base of every component: a class with a nested, typed ``Config``."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a config tree, in the four parts that a user needs.

    Attributes:
        path: dotted path of the field, relative to the node whose ``check`` yields it; the walk over the
            tree prefixes it (``n_kv_heads`` becomes ``model.attention.n_kv_heads``).
        value: the value found.
        reason: what is wrong, with every number that takes part.
        remedy: what to set instead.
    """

    path: str
    value: Any
    reason: str
    remedy: str

    def within(self, section: str) -> "Problem":
        """The same problem as seen from the node around ``section``; a path of no field is the section itself."""
        path = f"{section}.{self.path}" if self.path else section
        return dataclasses.replace(self, path=path)

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else repr(self.value)
        head = f"{self.path}={shown}" if self.path else shown
        return f"{head}: {self.reason}; {self.remedy}"


class Configurable:
    """A component that is made from its nested ``Config``.

    A subclass defines ``Config(Configurable.Config)`` as a ``@dataclass(kw_only=True, slots=True)`` and gives it
    a hand-written ``build`` with the runtime arguments that the component needs, so that a reader and a type
    checker can follow ``AdamW.Config(...)`` to ``AdamW``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Settings of a component: plain values and other ``Config`` nodes, nothing else."""

        OPERATIONAL: ClassVar[frozenset[str]] = frozenset()
        """Fields that do not change what is computed (intervals, worker counts, paths). A resumed run may
        change them freely; a change in any other field is refused unless it is allowed by name."""

        def check(self) -> Iterator[Problem]:
            """Yield what is wrong with this node alone; rules that span nodes belong to the parent."""
            return iter(())


@runtime_checkable
class ChecksWorld(Protocol):
    """A root config with rules that need the number of ranks."""

    def check_world(self, world_size: int) -> Iterator[Problem]:
        """Yield what is wrong when the run has ``world_size`` ranks; paths are from the root."""
        ...


@runtime_checkable
class KeepsCheckpoints(Protocol):
    """A root config whose run can be resumed."""

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint of the run's folder; None if there is none yet."""
        ...


@runtime_checkable
class NeedsMachine(Protocol):
    """A root config that asks something of the machine that it runs on; other machines can plan it all the same."""

    def check_machine(self) -> Iterator[Problem]:
        """Yield what this machine lacks."""
        ...


@runtime_checkable
class DescribesRun(Protocol):
    """A root config that can say what each rank of its run will do."""

    def describe_run(self, world_size: int, rank: int) -> str:
        """What ``rank`` of ``world_size`` holds and sends, as text; builds nothing that lasts."""
        ...
