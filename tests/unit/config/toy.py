"""A small config tree with every kind of field."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchtitan.config import Configurable, Problem


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Layer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A layer."""

        width: int = 4
        """Width in units."""

        def check(self) -> Iterator[Problem]:
            if self.width < 1:
                yield Problem("width", self.width, "is not positive", "set 1 or more")


class WideLayer(Layer):
    @dataclass(kw_only=True, slots=True)
    class Config(Layer.Config):
        """A layer with one more field."""

        stretch: float = 1.5
        """Factor."""


class Source(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Where text comes from."""

        OPERATIONAL = frozenset({"workers"})

        path: str
        """File."""
        weight: float = 1.0
        """Share."""
        workers: int = 0
        """Processes."""


class Root(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A whole run."""

        OPERATIONAL = frozenset({"folder", "held_out"})

        steps: int
        """Optimizer steps."""
        layer: Layer.Config
        """The layer."""
        other_layer: Layer.Config | None = None
        """Another one; None for none."""
        sources: list[Source.Config] = field(default_factory=list)
        """Sources, in order."""
        named: dict[str, Source.Config] = field(default_factory=dict)
        """Sources by name."""
        held_out: Source.Config | None = None
        """Held-out text; None for none."""
        lr: float = 1e-3
        """Learning rate."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay rates."""
        lengths: tuple[int, ...] = ()
        """Any number of lengths."""
        tags: list[str] = field(default_factory=list)
        """Labels."""
        keywords: dict[str, bool | int | float | str] = field(default_factory=dict)
        """Anything by name."""
        by_layer: dict[int, float] = field(default_factory=dict)
        """Factor by layer number."""
        mode: Literal["fast", "exact"] = "fast"
        """How."""
        color: Color = Color.RED
        """Which."""
        limit: int | None = None
        """Limit; None for none."""
        cache: Path = Path("cache")
        """Folder of files that can be made again."""
        compiled: bool = False
        """Whether to compile."""
        folder: str = ""
        """Run folder."""

        def check_world(self, world_size: int) -> Iterator[Problem]:
            if self.steps % world_size:
                reason = f"does not divide by {world_size} ranks"
                yield Problem("steps", self.steps, reason, f"set a multiple of {world_size}")


def tree() -> Root.Config:
    """A tree in which most fields differ from their defaults."""
    return Root.Config(
        steps=4,
        layer=WideLayer.Config(width=8),
        sources=[Source.Config(path="a"), Source.Config(path="b", weight=0.5)],
        named={"books": Source.Config(path="c")},
        held_out=Source.Config(path="d"),
        keywords={"group": "x"},
        lengths=(1, 2),
        tags=["t"],
    )
