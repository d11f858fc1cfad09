"""Rules between the sections of a run's config that no section can check alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan.config.configurable import Problem
from torchtitan.models.model import Model
from torchtitan.optim.optimizer import Optimizer
from torchtitan.optim.state import DEFAULT_BLOCK_SIZE
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.parallel.compile import Compile
from torchtitan.parallel.degrees import Degrees
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.tensor import module_cuts
from torchtitan.training.settings import Training


def check_compiled(
    mesh: Mesh.Config, recompute: ActivationCheckpointing.Config, compile: Compile.Config
) -> Iterator[Problem]:
    """Yield a problem for each setting that is the compiler's work, if nothing is compiled."""
    if mesh.async_tp and not compile.enabled:
        yield Problem(
            "parallelism.async_tp",
            True,
            "is the compiler's work, but compile.enabled=False",
            "set compile.enabled=True, or async_tp=False",
        )
    if recompute.mode == "budget" and not (compile.enabled and compile.backend != "eager"):
        yield Problem(
            "activation_checkpointing.mode",
            "budget",
            f"is the compiler's choice, but compile.enabled={compile.enabled} and compile.backend={compile.backend}",
            "set compile.enabled=True and backend inductor or aot_eager, or mode full or selective",
        )


def check_budget(mesh: Mesh.Config, recompute: ActivationCheckpointing.Config) -> Iterator[Problem]:
    """Yield a problem if the compiler cannot weigh what a block keeps."""
    if recompute.mode == "budget" and mesh.tp > 1:
        yield Problem(
            "activation_checkpointing.mode",
            "budget",
            f"cannot weigh the DTensors of parallelism.tp={mesh.tp}",
            "set mode full or selective, or tp=1",
        )


def check_offload(optimizer: Optimizer.Config, training: Training.Config) -> Iterator[Problem]:
    """Yield a problem if there is no other memory to move the optimizer's state to."""
    if optimizer.offload and training.device == "cpu":
        yield Problem(
            "optimizer.offload",
            True,
            "but training.device=cpu trains in host memory anyway",
            "set optimizer.offload=False",
        )


def check_gpu(optimizer: Optimizer.Config, training: Training.Config) -> Iterator[Problem]:
    """Yield a problem for each setting that needs a GPU, if this machine has none."""
    if torch.cuda.is_available():
        return
    if training.device == "cuda":
        yield Problem(
            "training.device", "cuda", "but this machine has no usable GPU", "set auto or cpu"
        )
    if optimizer.offload and training.device == "auto":
        yield Problem(
            "optimizer.offload",
            True,
            "but this machine has no usable GPU, so it trains in host memory anyway",
            "set optimizer.offload=False",
        )


def check_updates(
    optimizer: Optimizer.Config, training: Training.Config, degrees: Degrees
) -> Iterator[tuple[Problem, str]]:
    """What keeps parameters from being updated in the backward, with the section of each problem."""
    if not optimizer.in_backward:
        return
    reason = "but with optimizer.in_backward=True "
    local, micro = training.global_batch_rows // degrees.data, training.micro_batch_rows
    if degrees.pp > 1:
        yield (
            Problem(
                "pp",
                degrees.pp,
                reason + "each micro-batch of a pipeline would be a step of its own",
                "set parallelism.pp=1 (and more dp_shard or tp), or optimizer.in_backward=False",
            ),
            "parallelism",
        )
    elif micro is not None and micro < local:
        yield (
            Problem(
                "micro_batch_rows",
                micro,
                f"makes {local // micro} micro-batches of a rank's {local} rows, {reason}each of them "
                "would be a step of its own",
                f"set training.micro_batch_rows=None, or training.global_batch_rows={micro * degrees.data} "
                "(with a lower optimizer.lr), or optimizer.in_backward=False",
            ),
            "training",
        )
    if training.max_grad_norm is not None and training.clip_by == "all":
        yield (
            Problem(
                "max_grad_norm",
                training.max_grad_norm,
                reason
                + "the norm of all gradients is not known before the first of them are used up",
                "set training.clip_by=parameter, or training.max_grad_norm=None, or "
                "optimizer.in_backward=False",
            ),
            "training",
        )


def check_parameters(
    optimizer: Optimizer.Config, model: Model.Config, degrees: Degrees
) -> Iterator[Problem]:
    """Yield what of the optimizer's settings does not fit the model's parameters, as they are cut over ``degrees``.

    They are known from a model without memory, which is built only for settings that go by them.

    Args:
        optimizer: settings.
        model: sound by itself.
        degrees: of the mesh.
    """
    if not optimizer.param_groups and (
        degrees.tp == 1 or optimizer.state_dtype not in DEFAULT_BLOCK_SIZE
    ):
        return
    with torch.device("meta"):
        built = model.build()
    names = {parameter: name for name, parameter in built.named_parameters()}
    found: dict[str, tuple[Tensor, int]] = {}
    for module, cut in module_cuts(built).values():
        for parameter in module.parameters(recurse=False):
            dealt = cut.shard_dim == parameter.ndim - 1 and not cut.elsewhere
            if parameter.requires_grad:
                found[names[parameter]] = parameter, degrees.tp if dealt else 1
    in_order = {name: found[name] for name in names.values() if name in found}
    yield from optimizer.check_parameters(in_order, degrees.tp)
