"""Activation checkpointing: compute a block again in the backward instead of keeping what is inside it."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.model import Model
from torchtitan.ops import all_to_all, context_attention, document_attention
from torchtitan.parallel.activation_offload import apply_activation_offload, selective_contexts

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# FSDP of experts, a unit inside of a block, marks its work for the profiler: more often in the recomputation.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)

MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.linear.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
    }
)
"""Of these, every n-th is kept."""

ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
        document_attention.OPERATOR,
        context_attention.OPERATOR,
    }
)
"""All kept: the most FLOPs for the fewest bytes."""

COLLECTIVES = frozenset(
    {
        c10d.reduce_scatter_tensor.default,
        c10d.all_reduce.default,
        c10d.all_to_all_single.default,
        all_to_all.OPERATOR,
    }
)
"""All kept: repeating them would wait for other ranks. An all-gather is repeated: what it makes is what was sharded to
save memory."""


class ActivationCheckpointing(Configurable):
    """What of a block's inside is kept between its forward and its backward. The result is the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `ActivationCheckpointing`."""

        mode: Literal["none", "full", "selective", "budget"] = "none"
        """`none` keeps everything; `full` keeps a block's input and computes the rest again, about a third more
        FLOPs; `selective` also keeps the results of attention, of collectives and of every n-th matmul; with `budget` the
        compiler chooses what is kept of a compiled block (`memory_budget`)."""
        memory_budget: float = 0.5
        """For `budget`: part of what a compiled block would keep, from 0 (its input, as `full`) to 1."""
        offload: bool = False
        """Let what is kept, whatever the mode, wait in host memory; on GPUs the copies run beside the computation."""
        every_n_blocks: int = 1
        """Blocks between two checkpointed ones, counted from the first: 2 leaves every second one as it is. Not with
        `budget`."""
        save_every_n_matmuls: int = 2
        """For `selective`: 1 keeps the results of all matmuls, 2 of every second one, 0 of none."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.every_n_blocks < 1:
                yield Problem(
                    "every_n_blocks",
                    self.every_n_blocks,
                    "is not positive",
                    "set 1 for every block, or mode none for no block",
                )
            elif self.every_n_blocks > 1 and self.mode == "budget":
                yield Problem(
                    "every_n_blocks",
                    self.every_n_blocks,
                    "leaves blocks out, but mode=budget is for all of them: they share one compiled graph",
                    "set 1 and a higher memory_budget, or mode full or selective",
                )
            if self.save_every_n_matmuls < 0:
                yield Problem(
                    "save_every_n_matmuls",
                    self.save_every_n_matmuls,
                    "is negative",
                    "set 1 to keep all, 2 for every second one, 0 for none",
                )

            if not 0 <= self.memory_budget <= 1:
                yield Problem(
                    "memory_budget", self.memory_budget, "is not a part of a whole", "set 0 to 1"
                )

        @property
        def compiled_budget(self) -> float | None:
            """What the compiler is told, if it chooses."""
            return self.memory_budget if self.mode == "budget" else None

        def check_split_backward(self, schedule: str) -> Iterator[Problem]:
            """Yield a problem if a block cannot be recomputed twice, as pipelines do that split the backward."""
            if self.mode == "selective":
                yield Problem(
                    "mode",
                    self.mode,
                    "recomputes a block once, but parallelism.pipeline.schedule="
                    f"{schedule} goes back through it twice, for its inputs and for its weights",
                    "set mode full or none, or a schedule with whole backwards such as 1F1B or Interleaved1F1B",
                )


def apply_activation_checkpointing(model: Model, config: ActivationCheckpointing.Config) -> None:
    """Let the blocks of ``model`` recompute themselves, in place; names and parameters stay as they are.

    The class of a block is replaced by a subclass with another ``forward`` (as FSDP2 does with its own), so the
    hooks of FSDP stay outside: a recomputation gathers nothing, the backward has already. All blocks share one
    subclass, so torch.compile makes one graph for all.
    """
    if config.mode in ("full", "selective"):
        save = None if config.mode == "full" else config.save_every_n_matmuls
        for block in list(model.blocks())[:: config.every_n_blocks]:
            block.__class__ = _checkpointed(type(block), save)
    if config.offload:
        apply_activation_offload(model)


def recomputation(block: nn.Module) -> Literal["none", "full", "selective"]:
    """What of ``block`` is computed again in the backward."""
    return getattr(block, "_recomputation", "none")


@functools.cache
def _checkpointed(cls: type[nn.Module], save_every_n_matmuls: int | None) -> type[nn.Module]:
    """The subclass of ``cls`` whose forward is recomputed in the backward."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if save_every_n_matmuls is not None:
        options["context_fn"] = functools.partial(_contexts, save_every_n_matmuls)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = super(made, self)  # pyright: ignore[reportArgumentType] - made is a subclass of cls
        return checkpoint(inner.forward, *args, **options, **kwargs)

    kind = "full" if save_every_n_matmuls is None else "selective"
    made = type(f"Checkpointed{cls.__name__}", (cls,), {"forward": forward, "_recomputation": kind})
    return made


def _contexts(
    save_every_n_matmuls: int,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of one forward and of its recomputation, each of which counts its own matmuls."""
    policy = _Policy(save_every_n_matmuls)
    return selective_contexts(policy) or create_selective_checkpoint_contexts(policy)


class _Policy:
    """Which operations are kept."""

    def __init__(self, save_every_n_matmuls: int) -> None:
        self.every = save_every_n_matmuls
        self.seen = {False: 0, True: 0}
        """Matmuls so far, in the forward and in the recomputation."""

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operator in ATTENTION or operator in COLLECTIVES
        if operator in MATMULS and self.every:
            self.seen[context.is_recompute] += 1
            save = self.seen[context.is_recompute] % self.every == 1 % self.every
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
