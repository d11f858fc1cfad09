"""Counts the bytes of tensors as they come and go, real or fake."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan import torch_api


class MemoryTracker(TorchDispatchMode):
    """Within it, knows how many bytes of storage are alive, and how many were at most in each phase.

    A storage is counted from the operation that returns a tensor on it until it is freed or resized. What kernels allocate
    inside themselves is not seen.

    Args:
        held: tensors that are there already.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = {}
        """Most bytes by phase."""
        self._phase = ""
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._resize: Callable[..., Any] | None = None
        for tensor in held:
            self._see(tensor)

    @property
    def peak(self) -> int:
        """Most bytes in all phases."""
        return max(self.peaks.values(), default=self.live)

    def enter_phase(self, name: str) -> None:
        """Count peaks under ``name`` from now on."""
        self._phase = name
        self._note()

    def __enter__(self) -> "MemoryTracker":
        """Begin to count; also what is freed by resizing, which is no operation (FSDP does so)."""
        self._resize = resize = torch.UntypedStorage.resize_
        tracker = self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue]
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Stop counting."""
        super().__exit__(*exc_info)
        torch.UntypedStorage.resize_ = self._resize  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` and look at what it returns."""
        if any(issubclass(kind, torch_api.DTensor) for kind in types):
            return NotImplemented  # comes back with the local tensors
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self._note()
        return result

    def _see(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, torch_api.DTensor) else tensor
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            self._resized(storage)
            return

        def freed(_: Any, key: int = key) -> None:
            self.live -= self._sizes.pop(key)[1]

        self._sizes[key] = weakref.ref(storage, freed), storage.nbytes()
        self.live += storage.nbytes()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._sizes:
            ref, before = self._sizes[key]
            self._sizes[key] = ref, size
            self.live += size - before
            self._note()

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live)


class WithoutValues(TorchDispatchMode):
    """On fake tensors, answers what would need their values: every label counts, and every number that is read is 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, or answer for it."""
        if func is torch.ops.aten.nonzero.default:
            (mask,) = args
            return mask.new_empty((mask.numel(), mask.ndim), dtype=torch.int64)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))
