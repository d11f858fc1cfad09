"""A root config with rules of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.unit.cli.toy_run import Run
from torchtitan.config import Problem


class Checked(Run):
    @dataclass(kw_only=True, slots=True)
    class Config(Run.Config):
        """A run over rows."""

        rows: int = 8
        """Rows of a step."""

        def check(self) -> Iterator[Problem]:
            if self.rows < 1:
                yield Problem("rows", self.rows, "is not positive", "set 1 or more")

        def check_world(self, world_size: int) -> Iterator[Problem]:
            if self.rows < world_size:
                reason = f"is less than the {world_size} ranks"
                yield Problem("rows", self.rows, reason, f"set {world_size} or more")


def toy_checked() -> Checked.Config:
    """A checked run."""
    return Checked.Config()
