"""The parts of torch that are slow to import or new, each imported on first use.

``import torch`` alone does not load DTensor, FSDP2 or distributed checkpoints; they cost another 0.7 s of CPU,
which ``--help`` and every config error would pay. So the package writes ``torch_api.DTensor``
and pays when it is touched. Whatever differs between the supported torch versions (>= 2.11) belongs here too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    import torch.cuda as cuda
    import torch.distributed._symmetric_memory as symmetric_memory
    import torch.distributed.checkpoint as dcp
    import torch.distributed.elastic.rendezvous as rendezvous
    import torch.distributed.pipelining.schedules as pipeline_schedules
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        FailOnRecompileLimitHit,
        TorchDynamoException,
    )
    from torch._subclasses import FakeTensorMode
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented
    from torch.distributed import all_gather_single as all_gather_single
    from torch.distributed import reduce_scatter_single as reduce_scatter_single
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.distributed_c10d import (
        _resolve_process_group as resolve_process_group,  # pyright: ignore[reportPrivateImportUsage] - no public one
    )
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.nn.functional import grouped_mm
    from torch.testing._internal.distributed.fake_pg import FakeStore

_HOME = {
    "BackendCompilerFailed": "torch._dynamo.exc:BackendCompilerFailed",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FakeTensorMode": "torch._subclasses:FakeTensorMode",
    "FailOnRecompileLimitHit": "torch._dynamo.exc:FailOnRecompileLimitHit",
    "TorchDynamoException": "torch._dynamo.exc:TorchDynamoException",
    "cuda": "torch.cuda",
    "dynamo_config": "torch._dynamo.config",
    "functorch_config": "torch._functorch.config",
    "inductor_config": "torch._inductor.config",
    "symmetric_memory": "torch.distributed._symmetric_memory",
    "rendezvous": "torch.distributed.elastic.rendezvous",
    "pipeline_schedules": "torch.distributed.pipelining.schedules",
    "PipelineStage": "torch.distributed.pipelining:PipelineStage",
    "TCPStore": "torch.distributed:TCPStore",
    "all_gather_single": "torch.distributed:all_gather_single",
    "dcp": "torch.distributed.checkpoint",
    "DeviceMesh": "torch.distributed.device_mesh:DeviceMesh",
    "init_device_mesh": "torch.distributed.device_mesh:init_device_mesh",
    "FSDPModule": "torch.distributed.fsdp:FSDPModule",
    "MixedPrecisionPolicy": "torch.distributed.fsdp:MixedPrecisionPolicy",
    "fully_shard": "torch.distributed.fsdp:fully_shard",
    "DTensor": "torch.distributed.tensor:DTensor",
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "Partial": "torch.distributed.tensor:Partial",
    "Replicate": "torch.distributed.tensor:Replicate",
    "Shard": "torch.distributed.tensor:Shard",
    "distribute_tensor": "torch.distributed.tensor:distribute_tensor",
    "grouped_mm": "torch.nn.functional:grouped_mm",
    "reduce_scatter_single": "torch.distributed:reduce_scatter_single",
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
}
_BEFORE = {  # names of torch 2.11 and 2.12
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}

__all__ = [
    "BackendCompilerFailed",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "FSDPModule",
    "FailOnRecompileLimitHit",
    "FakeStore",
    "FakeTensorMode",
    "MixedPrecisionPolicy",
    "Partial",
    "PipelineStage",
    "Replicate",
    "Shard",
    "TCPStore",
    "TensorMeta",
    "TorchDynamoException",
    "all_gather_single",
    "cuda",
    "dcp",
    "distribute_tensor",
    "dynamo_config",
    "fully_shard",
    "functorch_config",
    "grouped_mm",
    "inductor_config",
    "init_device_mesh",
    "pipeline_schedules",
    "reduce_scatter_single",
    "rendezvous",
    "resolve_process_group",
    "symmetric_memory",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    found: Any = importlib.import_module(module)
    if attribute:
        found = getattr(found, attribute, None) or getattr(found, _BEFORE.get(name, attribute))
    globals()[name] = found
    return found
