"""Counts what a rank really sends: every collective that torch dispatches while it is entered."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {  # name -> (our name, position of the tensor that is the payload, position of the group)
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::send": ("send", 0, 1),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None, 2),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_reduce_": ("all_reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 3),
}
SILENT = {  # they carry nothing, or nothing of the step
    "c10d::barrier",
    "c10d::broadcast_",
    "c10d::recv_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


class TrafficRecorder(TorchDispatchMode):
    """``seen[operation, ranks of its group] == [calls, payload in bytes]``.

    Groups of one rank are left out, and so are float64 tensors: the counts, losses and norms of a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if (
            name in OPDEFS
        ):  # an operator of our own: what it calls is not dispatched to us otherwise
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if name in OPERATIONS:
            self._record(*OPERATIONS[name], args, out)
        elif name.startswith(("c10d::", "_c10d_functional::")) and name not in SILENT:
            raise AssertionError(f"{name} is not counted")
        return out

    def _record(self, operation: str, tensor: int | None, group: int, args: Any, out: Any) -> None:
        payload = out if tensor is None else args[tensor]
        payload = payload[0] if isinstance(payload, list) else payload
        where = args[group]
        if isinstance(where, str):
            ranks = torch._C._distributed_c10d._resolve_process_group(where).size()
        else:
            ranks = dist.ProcessGroup.unbox(where).size()
        if ranks > 1 and payload.dtype != torch.float64:
            self.seen[operation, ranks][0] += 1
            self.seen[operation, ranks][1] += payload.nbytes


def stated(rows) -> dict[tuple[str, int], list[int]]:
    """Rows of `Traffic`, summed as the recorder sums."""
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        sums[row.operation, row.ranks][0] += row.calls
        sums[row.operation, row.ranks][1] += row.payload
    return dict(sums)
