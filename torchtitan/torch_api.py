"""The parts of torch that are slow to import or new, each imported on first use.

``import torch`` alone does not load DTensor, FSDP2 or distributed checkpoints; they cost another 0.7 s of CPU,
which ``--help`` and every config error would pay. So the package writes ``torch_api.DTensor``
and pays when it is touched. Whatever differs between the supported torch versions (>= 2.11) belongs here too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.cuda as cuda
    import torch.distributed.checkpoint as dcp
    import torch.distributed.elastic.rendezvous as rendezvous
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        FailOnRecompileLimitHit,
        TorchDynamoException,
    )
    from torch._subclasses import FakeTensorMode
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

_HOME = {
    "BackendCompilerFailed": "torch._dynamo.exc:BackendCompilerFailed",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FakeTensorMode": "torch._subclasses:FakeTensorMode",
    "FailOnRecompileLimitHit": "torch._dynamo.exc:FailOnRecompileLimitHit",
    "TorchDynamoException": "torch._dynamo.exc:TorchDynamoException",
    "cuda": "torch.cuda",
    "rendezvous": "torch.distributed.elastic.rendezvous",
    "TCPStore": "torch.distributed:TCPStore",
    "dcp": "torch.distributed.checkpoint",
    "DeviceMesh": "torch.distributed.device_mesh:DeviceMesh",
    "init_device_mesh": "torch.distributed.device_mesh:init_device_mesh",
    "FSDPModule": "torch.distributed.fsdp:FSDPModule",
    "MixedPrecisionPolicy": "torch.distributed.fsdp:MixedPrecisionPolicy",
    "fully_shard": "torch.distributed.fsdp:fully_shard",
    "DTensor": "torch.distributed.tensor:DTensor",
    "Partial": "torch.distributed.tensor:Partial",
    "Replicate": "torch.distributed.tensor:Replicate",
    "Shard": "torch.distributed.tensor:Shard",
    "distribute_tensor": "torch.distributed.tensor:distribute_tensor",
}

__all__ = [
    "BackendCompilerFailed",
    "DTensor",
    "DeviceMesh",
    "FSDPModule",
    "FailOnRecompileLimitHit",
    "FakeStore",
    "FakeTensorMode",
    "MixedPrecisionPolicy",
    "Partial",
    "Replicate",
    "Shard",
    "TCPStore",
    "TorchDynamoException",
    "cuda",
    "dcp",
    "distribute_tensor",
    "fully_shard",
    "init_device_mesh",
    "rendezvous",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    found: Any = importlib.import_module(module)
    if attribute:
        found = getattr(found, attribute)
    globals()[name] = found
    return found
