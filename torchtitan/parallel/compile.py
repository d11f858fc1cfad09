"""torch.compile, one graph a block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from torchtitan import torch_api
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.models.layers.head import Head
from torchtitan.models.model import Model


class Compile(Configurable):
    """Compilation of the blocks. They are alike, so one graph serves them all, and start-up does not grow with depth."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `Compile`."""

        enabled: bool = False
        """Compile each block. The first step then takes seconds (CPU) to a minute longer."""
        loss: bool = False
        """Compile what the loss does with a chunk's logits too: fewer passes over them."""
        fullgraph: bool = True
        """Refuse a block that is not one graph, instead of running its pieces one by one."""
        backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
        """What compiles; the two others are for finding faults: aot_eager stops before the code generation, eager before
        the autograd graph."""
        mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
        """Of inductor: the second tries several kernels for each matmul, which takes minutes at the start."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.mode != "default" and self.backend != "inductor":
                yield Problem(
                    "mode",
                    self.mode,
                    f"is one of inductor's, but backend={self.backend}",
                    "set mode default, or backend inductor",
                )
            if self.loss and not (self.enabled and self.backend == "inductor"):
                yield Problem(
                    "loss",
                    True,
                    f"is for compiled runs, but enabled={self.enabled} and backend={self.backend}",
                    "set enabled=True and backend inductor, or loss=False",
                )


def allow_backward_in_halves() -> None:
    """Let compiled graphs be gone back through for inputs first and for weights later: keep what the first reads."""
    torch_api.functorch_config.donated_buffer = False


def apply_compile(
    model: Model, config: Compile.Config, *, memory_budget: float | None = None
) -> None:
    """Compile the blocks of ``model`` in place, when they are first called; names and parameters stay as they are.

    Before FSDP2, whose hooks so stay outside of the graphs.

    Args:
        model: one model or stage.
        config: of the compilation.
        memory_budget: part of its activations that a block may keep; None for what the compiler finds best.
    """
    if not config.enabled:
        return
    # Tensor parallel's hooks exchange parameters inside of a checkpointed block and put them back, so there is nothing that
    # a recomputation would have to do again; dynamo cannot know.
    torch_api.dynamo_config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    names = {module: name for name, module in model.named_modules()}
    mode = None if config.mode == "default" else config.mode
    for block in model.blocks():
        block.compile(fullgraph=config.fullgraph, backend=config.backend, mode=mode)
        _explain_failures(block, names[block], memory_budget)
    for module in model.modules():
        if isinstance(module, Head):
            module.fused = config.loss


def uncompiled(model: Model) -> AbstractContextManager[Any]:
    """Within it the blocks of ``model`` run as they are written, as long as their shapes are of no lasting use."""
    if any(block._compiled_call_impl is not None for block in model.blocks()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _explain_failures(block: nn.Module, name: str, memory_budget: float | None) -> None:
    """Let what torch.compile refuses name the block and say what to do; compile within the budget."""
    compiled: Callable[..., Any] | None = block._compiled_call_impl
    if compiled is None:  # TORCH_COMPILE_DISABLE leaves a plain call
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with _budget(memory_budget):
                return compiled(*args, **kwargs)
        except (torch_api.TorchDynamoException, torch_api.FailOnRecompileLimitHit) as error:
            raise ConfigError(_explanation(name, error)) from error

    block._compiled_call_impl = call


def _budget(memory_budget: float | None) -> AbstractContextManager[Any]:
    """Where a graph is cut into forward and backward, the compiler reads the budget from its global settings."""
    if memory_budget is None:
        return nullcontext()
    return torch_api.functorch_config.patch(activation_memory_budget=memory_budget)


def _explanation(name: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if reason.endswith(":"):  # what follows is the cause
        reason = " ".join(lines[:2])
    if isinstance(error, torch_api.FailOnRecompileLimitHit):
        remedy = "keep the shapes of all micro-batches equal, or set compile.enabled=False"
        return f"compile.enabled=True: {name} was compiled too often ({reason}); {remedy}"
    if isinstance(error, torch_api.BackendCompilerFailed):
        remedy = "set compile.backend=aot_eager to see whether it is inductor's, or compile.enabled=False"
        return f"compile.enabled=True: {name} cannot be compiled ({reason}); {remedy}"
    remedy = "move what breaks it out of the block or into a custom operator, or set compile.fullgraph=False or compile.enabled=False"
    return f"compile.fullgraph=True: {name} is not one graph ({reason}{_place(lines)}); {remedy}"


def _place(lines: list[str]) -> str:
    """The user's line where it happened, from dynamo's own trace in the message."""
    places = [line for line in lines if line.startswith('File "')]
    return f", {places[-1]}" if places else ""
