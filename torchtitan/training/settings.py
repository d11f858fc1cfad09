"""How long, how large and how exactly a run trains."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.optim.clipping import ClipBy


class Training(Configurable):
    """The run's own numbers, whatever the model and the method."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Training`."""

        OPERATIONAL = frozenset(
            {
                "steps",
                "epochs",
                "micro_batch_rows",
                "device",
                "gc_every_n_steps",
                "compare_ranks_every_n_steps",
            }
        )

        steps: int | None = None
        """Optimizer steps in all, those before a resume included; None where `epochs` says it."""
        epochs: float | None = None
        """How often all rows are read, instead of `steps`: the steps that this takes are counted at the start, a part of
        one as a whole. For data whose packed rows are known beforehand; None where `steps` says it."""
        seq_len: int
        """Tokens in a row."""
        global_batch_rows: int
        """Rows of an optimizer step over all data ranks and micro-batches."""
        micro_batch_rows: int | None = None
        """Rows that a rank computes at once; the rest is accumulated. None means all of the rank's rows; in a pipeline,
        the most of which there is one micro-batch for each stage."""
        max_grad_norm: float | None = 1.0
        """Largest gradient norm; a longer gradient is scaled down to it. None means no clipping."""
        clip_by: ClipBy = "all"
        """Whose norm `max_grad_norm` bounds: that of all gradients together, or of each parameter's on its own."""
        seed: int = 0
        """Of weights, data order and dropout."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """Where to train; auto means a GPU if there is one."""
        compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """Type of matmuls and activations. auto means bfloat16 on a GPU and float32 on a CPU, where bfloat16 is
        slower."""
        parameter_dtype: Literal["float32", "bfloat16"] = "float32"
        """Type of the parameters between steps, and of their gradients after the reduction over ranks, which is in
        float32. There is no second copy: bfloat16 parameters are updated in float32 and rounded stochastically."""
        deterministic: bool = False
        """Refuse GPU kernels whose result differs from run to run (a CPU run always repeats bit for bit)."""
        gc_every_n_steps: int = 50
        """Steps between Python garbage collections, on all ranks at the same step; it is off in between."""

        compare_ranks_every_n_steps: int = 0
        """Steps between comparisons of what several ranks hold, bit for bit: weights and optimizer state that are
        replicated, loss, step and data position. A difference ends the run and names the ranks; 0 for none."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.compare_ranks_every_n_steps < 0:
                yield Problem(
                    "compare_ranks_every_n_steps",
                    self.compare_ranks_every_n_steps,
                    "is negative",
                    "set a number of steps, or 0 for none",
                )
            for name in ("steps", "seq_len", "global_batch_rows", "gc_every_n_steps"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    yield Problem(name, value, "is not positive", "set at least 1")
            if self.epochs is not None and not 0 < self.epochs < math.inf:
                yield Problem("epochs", self.epochs, "is not positive", "set such as 3")
            if self.steps is not None and self.epochs is not None:
                yield Problem(
                    "epochs",
                    self.epochs,
                    f"and steps={self.steps} both say how long the run is",
                    "set one of them to None",
                )
            if self.steps is None and self.epochs is None:
                yield Problem(
                    "steps",
                    None,
                    "and epochs=None leave open how long the run is",
                    "set one of them",
                )
            if self.micro_batch_rows is not None and self.micro_batch_rows < 1:
                yield Problem(
                    "micro_batch_rows", self.micro_batch_rows, "is not positive", "set at least 1"
                )
            if self.max_grad_norm is not None and self.max_grad_norm <= 0:
                yield Problem(
                    "max_grad_norm",
                    self.max_grad_norm,
                    "is not positive",
                    "set None for no clipping",
                )
            if self.seed < 0:
                yield Problem("seed", self.seed, "is negative", "set 0 or more")

        def n_steps(self, packed_rows: int | None) -> int:
            """Optimizer steps in all.

            Args:
                packed_rows: rows of an epoch; None where they are not known beforehand.

            Raises:
                ConfigError: if there are epochs and no rows to count them by.
            """
            if self.epochs is None:
                return self.steps or 0  # `check` has seen to it that there are some
            if packed_rows is None:
                raise ConfigError(
                    f"training.epochs={self.epochs}: how many rows the data packs into is not known before it is "
                    "read; set training.steps, or data that is packed beforehand"
                )
            steps = self.epochs * packed_rows / self.global_batch_rows
            return max(1, math.ceil(steps - 1e-6))  # less than a millionth of a step is rounding

        def check_rows(self, dp_world_size: int) -> Iterator[Problem]:
            """Yield a problem if the rows cannot be dealt evenly to ``dp_world_size`` data ranks."""
            rows, micro = self.global_batch_rows, self.micro_batch_rows
            if rows < 1 or (micro is not None and micro < 1):
                return
            if rows % dp_world_size:
                below = rows - rows % dp_world_size
                yield Problem(
                    "global_batch_rows",
                    rows,
                    f"does not divide by the {dp_world_size} data ranks",
                    f"set {[n for n in (below, below + dp_world_size) if n]}, or use another number of ranks",
                )
            elif micro is not None and (rows // dp_world_size) % micro:
                local = rows // dp_world_size
                yield Problem(
                    "micro_batch_rows",
                    micro,
                    f"does not divide the {local} rows of a rank (global_batch_rows={rows} / {dp_world_size} "
                    "data ranks)",
                    f"choose one of {[n for n in range(1, local + 1) if local % n == 0]}, or None for all",
                )

    @staticmethod
    def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
        """The type that `Config.compute_dtype` means on ``device``."""
        if config.compute_dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return getattr(torch, config.compute_dtype)
