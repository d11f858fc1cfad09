"""Activation offload: what a block keeps for its backward waits in host memory.

Autograd hands each tensor that it keeps to `_Call.pack` and asks for it by `_Call.unpack`. On a GPU the copies run on two
streams of their own, out and back, beside the computation: the tensors of the block before are on their way when a block's
backward begins. On a CPU there is only host memory; the copies are made all the same, so a test proves there what a
GPU run does, and no memory is saved.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from torchtitan.models.model import Model

MIN_BYTES = 4096
"""Smaller tensors stay: a copy costs more than it frees."""


def apply_activation_offload(model: Model) -> None:
    """Let the blocks of ``model`` keep their activations in host memory, in place; names and parameters stay as they are.

    All but the last block, whose backward comes at once. Like checkpointing it replaces a block's class, but around
    ``__call__``: the graph of a compiled block and FSDP's hooks are inside.
    """
    blocks = list(model.blocks())
    order = _Order()
    for block in blocks[:-1]:
        block.__class__ = _offloaded(type(block))
        object.__setattr__(block, "_offload_order", order)


def selective_contexts(
    policy: Callable[..., CheckpointPolicy],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
    """Contexts of a block's forward and its recomputation that keep in host memory what ``policy`` saves.

    Selective checkpointing keeps the results of operations itself, past autograd's hooks. None where those of torch do: outside of a
    block that is offloaded, and within a compiled one, whose graph hands all that it keeps to autograd.
    """
    if not _calls or _calls[-1].compiled:
        return None
    kept: deque[Any] = deque()
    return _Keep(policy, kept, _calls[-1]), _Give(policy, kept, _calls[-1])


@functools.cache
def _offloaded(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` that is called within the hooks."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = super(made, self)
        if not torch.is_grad_enabled():
            return inner.__call__(*args, **kwargs)
        current = _Call(self, args, kwargs, self._offload_order)
        _calls.append(current)
        try:
            with saved_tensors_hooks(current.pack, current.unpack):
                return inner.__call__(*args, **kwargs)
        finally:
            _calls.pop()
            current.end()

    made = type(f"Offloaded{cls.__name__}", (cls,), {"__call__": call})
    return made


class _Order:
    """The call before, whose backward comes after; and the streams of the copies."""

    def __init__(self) -> None:
        self.last: weakref.ReferenceType[_Call] | None = None

    @functools.cached_property
    def out(self) -> "torch.cuda.Stream":
        """For copies to the host."""
        return torch.cuda.Stream()

    @functools.cached_property
    def back(self) -> "torch.cuda.Stream":
        """For copies to the device."""
        return torch.cuda.Stream()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Order":
        return _Order()


class _Away:
    """One tensor that is in host memory, or back."""

    def __init__(self, tensor: Tensor, order: _Order) -> None:
        self.order, self.device = order, tensor.device
        self.here: Tensor | None = None
        self.arrived: Any = None  # an event of the stream
        on_gpu = self.device.type == "cuda"
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
        with self._on(order.out) if on_gpu else nullcontext():
            self.host.copy_(tensor, non_blocking=on_gpu)
        if on_gpu:
            tensor.record_stream(order.out)  # its memory is free when the copy is done

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self.here is not None:
            return
        if self.device.type != "cuda":
            self.here = self.host
            return
        with self._on(self.order.back, after=self.order.out):
            self.here = self.host.to(self.device, non_blocking=True)
            self.arrived = self.order.back.record_event()

    def get(self) -> Tensor:
        """The tensor on its device."""
        self.fetch()
        here = self.here
        if here is None:
            raise RuntimeError("an offloaded tensor has not been fetched")
        if self.arrived is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(self.arrived)
            here.record_stream(now)
        return here

    def _on(
        self, stream: "torch.cuda.Stream", after: "torch.cuda.Stream | None" = None
    ) -> AbstractContextManager[Any]:
        stream.wait_stream(after or torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)


class _Call:
    """What one call of a block keeps.

    Args:
        block: the block.
        args: of the call; tensors beyond the first (tables, masks) serve all blocks and stay.
        kwargs: stay.
        order: of the calls.
    """

    def __init__(self, block: nn.Module, args: Any, kwargs: Any, order: _Order) -> None:
        self._block, self._order = block, order
        shared = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
        self._staying = {x.untyped_storage().data_ptr() for x in shared}
        self._parameters_known = False
        self._away: dict[tuple[Any, ...], _Away] = {}
        self._alive: list[Tensor] = []  # so that an address means one tensor during the call
        self.compiled = block._compiled_call_impl is not None
        self._before = order.last
        order.last = weakref.ref(self)

    def pack(self, tensor: Tensor) -> "Tensor | tuple[_Call, _Away]":
        """Copy to the host, unless the tensor is small, a parameter's, or shared by all blocks."""
        if tensor.nbytes < MIN_BYTES or self._stays(tensor):
            return tensor
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor._version,
        )
        if key not in self._away:
            self._alive.append(tensor)
            self._away[key] = _Away(tensor.detach(), self._order)
        return self, self._away[key]

    def unpack(self, packed: "Tensor | tuple[_Call, _Away]") -> Tensor:
        """Bring it back, and begin with those of the block whose backward is next."""
        if isinstance(packed, Tensor):
            return packed
        call, away = packed
        tensor = away.get()
        call._fetch_before()
        return tensor

    def end(self) -> None:
        """The block has run: its tensors may go."""
        self._alive.clear()
        self._staying.clear()
        self._block = None

    def fetch(self) -> None:
        """Begin to bring everything back."""
        for away in self._away.values():
            away.fetch()

    def _fetch_before(self) -> None:
        before, self._before = self._before, None
        call = before() if before is not None else None
        if call is not None:
            call.fetch()

    def _stays(self, tensor: Tensor) -> bool:
        if not self._parameters_known and self._block is not None:
            # Now, within the block: FSDP has put the gathered parameters in their places.
            held = [*self._block.parameters(), *self._block.buffers()]
            self._staying.update(x.untyped_storage().data_ptr() for x in map(_local, held))
            self._parameters_known = True
        return tensor.untyped_storage().data_ptr() in self._staying


_calls: list[_Call] = []
"""The calls of offloaded blocks that are running, innermost last."""


class _Keep(TorchDispatchMode):
    """In the forward: what the policy saves is packed."""

    is_recompute = False

    def __init__(
        self, policy: Callable[..., CheckpointPolicy], kept: deque[Any], call: _Call
    ) -> None:
        super().__init__()
        self.policy, self.kept, self.call = policy, kept, call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation, and keep its result if the policy says so."""
        out = func(*args, **kwargs)
        if self.saves(func, args, kwargs):
            self.kept.append(tree_map(self.pack, out))
        return out

    def saves(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this operation's result is kept."""
        return self.policy(self, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE

    def pack(self, leaf: Any) -> Any:
        """A tensor as it waits; anything else as it is."""
        return self.call.pack(leaf.detach()) if isinstance(leaf, Tensor) else leaf


class _Give(_Keep):
    """In the recomputation: what was saved is given, in the same order."""

    is_recompute = True

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The kept result of an operation, or its result."""
        if not self.saves(func, args, kwargs):
            return func(*args, **kwargs)
        if not self.kept:
            raise RuntimeError(
                "selective recomputation goes back through a block once, and what it kept has been used; use mode full or none"
            )
        return tree_map(self.unpack, self.kept.popleft(), is_leaf=_is_packed)

    def unpack(self, leaf: Any) -> Any:
        """See `pack`."""
        return self.call.unpack(leaf) if isinstance(leaf, Tensor) or _is_packed(leaf) else leaf


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], _Away)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided over ranks."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local().detach()
