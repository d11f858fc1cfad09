"""Tensor, sequence and loss parallelism: acts on the plans that the layers declare (`torchtitan.models.layers.plan`).

Parameters become DTensors over the ``tp`` axis, which FSDP then shards further and checkpoints reshard. While a
module's forward runs, its parameters are this rank's plain tensors, and collectives with explicit backwards stand at
the seams that the plans name. So activations are plain tensors too, and a layer's forward is the same code on one rank
and on many.
"""

# Shapes: B batch, S sequence, D dim. "/tp" = local to a TP rank.

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.errors import ConfigError
from torchtitan.models.layers.plan import Cut, HasParallelPlan, HasVocabulary, Sees
from torchtitan.ops.collectives import copy_to_all, gather_parts, sum_to_all, sum_to_parts
from torchtitan.ops.vocabulary import VocabularyShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SEQUENCE_DIM = 1  # of the residual stream, (B, S, D)


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: "DeviceMesh", *, sequence_parallel: bool
) -> None:
    """Cut ``model`` in place over ``tp_mesh``; one rank needs no cut.

    Args:
        model: on the meta device.
        tp_mesh: one axis.
        sequence_parallel: keep the residual stream as ``(B, S/tp, D)`` instead of ``(B, S, D)`` on each rank.

    Raises:
        TypeError: if a parameter is in no plan, or plans contradict each other.
    """
    if tp_mesh.size() == 1:
        return
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, (module, cut) in module_cuts(model).items():
        if cut.elsewhere:
            continue
        _place_parameters(name, module, cut, tp_mesh, placed)
        _CutModule(module, cut, tp_mesh.get_group(), sequence_parallel).register_hooks()


def enable_async_tp(tp_mesh: "DeviceMesh") -> None:
    """Let torch.compile decompose gathers and scatters over ``tp_mesh`` into pieces that overlap with their matmuls.

    Raises:
        ConfigError: if the ranks are not GPUs.
    """
    if tp_mesh.device_type != "cuda":
        raise ConfigError(
            f"parallelism.async_tp=True needs GPUs, and this run is on {tp_mesh.device_type}; set it to False"
        )
    torch_api.symmetric_memory.enable_symm_mem_for_group(tp_mesh.get_group().group_name)
    torch_api.inductor_config._micro_pipeline_tp = True


def module_cuts(model: nn.Module) -> dict[str, tuple[nn.Module, Cut]]:
    """All the plans of ``model`` in one table: the cut of each module that has one, by the module's name.

    Raises:
        TypeError: if two plans name a module, or none names a module with parameters of its own.
    """
    cuts: dict[str, tuple[nn.Module, Cut]] = {}
    for owner_name, owner in model.named_modules():
        if not isinstance(owner, HasParallelPlan):
            continue
        for relative, cut in owner.parallel_plan().items():
            name = ".".join(part for part in (owner_name, relative) if part)
            if name in cuts:
                raise TypeError(
                    f"module {name!r} is in two parallel plans, one of them that of {type(owner).__name__}; "
                    "take it out of the other"
                )
            cuts[name] = (model.get_submodule(name), cut)
    for name, module in model.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if own and name not in cuts:
            raise TypeError(
                f"parameter {f'{name}.{own[0]}'.lstrip('.')!r} is in no parallel plan; name its module in "
                f"{type(module).__name__}.parallel_plan() or in that of a module around it"
            )
    return cuts


def gradients_are_summands(cut: Cut, *, sequence_parallel: bool) -> bool:
    """Whether the ranks' gradients of a parameter that each has whole must be added up."""
    return cut.sees is Sees.PART or (cut.sees is Sees.STREAM and sequence_parallel)


class _CutModule:
    """One module on a rank of ``group``; the methods without a docstring of their own shape are its forward hooks."""

    def __init__(
        self, module: nn.Module, cut: Cut, group: dist.ProcessGroup, sequence_parallel: bool
    ) -> None:
        self.module, self.cut = module, cut
        self.group, self.sequence_parallel = group, sequence_parallel
        self.names = [name for name, _ in module.named_parameters(recurse=False)]
        self._summands = gradients_are_summands(cut, sequence_parallel=sequence_parallel)
        self._kept: dict[str, Any] = {}
        self._biases: list[Tensor] = []

    def register_hooks(self) -> None:
        """Stand around the module's forward."""
        if self.cut.gathers_input:
            self.module.register_forward_pre_hook(self.gather_input)
        if self.names:
            self.module.register_forward_pre_hook(self.put_local)
            # Also when the forward raises: recomputation of activations ends so, once it has what it needs.
            self.module.register_forward_hook(self.put_back, always_call=True)
        if self.cut.sums_output:
            self.module.register_forward_hook(self.sum_output)

    def gather_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``(B, S/tp, D) -> (B, S, D)``, or ``(B, S, D)`` as it is: the first argument, whole."""
        del module
        stream, *rest = args
        if self.sequence_parallel:
            return gather_parts(stream, _SEQUENCE_DIM, self.group), *rest
        return copy_to_all(stream, self.group), *rest

    def put_local(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put plain tensors in the parameters' places: this rank's shard, or the whole.

        ``to_local`` tells autograd what the gradient is: a shard, the whole, or (Partial) a summand of the whole, which
        FSDP adds up over the tp ranks once a step.
        """
        del args
        for name in self.names:
            parameter: Any = module._parameters[name]
            self._kept[name] = parameter
            whole = parameter.placements[0].is_replicate()
            late = (
                whole and self.cut.sums_output
            )  # a bias; before the sum it would be added tp times
            summed = self.sequence_parallel if late else self._summands
            gradient = [torch_api.Partial()] if whole and summed else parameter.placements
            local: Any = parameter.to_local(grad_placements=gradient)
            if late:
                self._biases.append(local)
            module._parameters[name] = None if late else local

    def put_back(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Put the parameters back."""
        del args, output
        for name, parameter in self._kept.items():
            module._parameters[name] = parameter

    def sum_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """``(B, S, D) -> (B, S/tp, D)``, or ``(B, S, D)``: the ranks' summands, added up."""
        del module, args
        if self.sequence_parallel:
            output = sum_to_parts(output, _SEQUENCE_DIM, self.group)
        else:
            output = sum_to_all(output, self.group)
        while self._biases:
            output = output + self._biases.pop()
        return output


def _place_parameters(
    name: str,
    module: nn.Module,
    cut: Cut,
    tp_mesh: "DeviceMesh",
    placed: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Make the module's own parameters DTensors, and tell it its vocabulary.

    Args:
        name: of the module.
        module: to be cut.
        cut: of the module.
        tp_mesh: one axis.
        placed: from the parameters before to those after; one that modules share stays one.
    """
    for key, parameter in list(module.named_parameters(recurse=False)):
        sharded = cut.shard_dim is not None and cut.shard_dim < parameter.ndim
        placement = torch_api.Shard(cut.shard_dim) if sharded else torch_api.Replicate()
        if parameter not in placed:
            whole = parameter.detach()
            local = torch_api.distribute_tensor(whole, tp_mesh, [placement], src_data_rank=None)
            placed[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        found: Any = placed[parameter]
        if found.placements != (placement,):
            raise TypeError(
                f"{name}.{key} is shared with a module whose parallel plan places it as {found.placements[0]}, not "
                f"{placement}; give both the same cut"
            )
        module.register_parameter(key, found)
        if cut.vocabulary:
            _tell_vocabulary(name, module, found, tp_mesh)


def _tell_vocabulary(name: str, module: nn.Module, table: Any, tp_mesh: "DeviceMesh") -> None:
    if not isinstance(module, HasVocabulary):
        raise TypeError(
            f"{name} is cut over the vocabulary, but {type(module).__name__} has no attribute `vocabulary`; "
            "give it one and use it in forward"
        )
    rows_per_rank = -(-table.shape[0] // tp_mesh.size())  # all but the last ranks' share
    module.vocabulary = VocabularyShard(
        group=tp_mesh.get_group(),
        start=min(table.shape[0], tp_mesh.get_local_rank() * rows_per_rank),
        size=table.to_local().shape[0],
        total=table.shape[0],
    )
