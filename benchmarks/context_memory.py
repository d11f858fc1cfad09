"""How much do a rank's activations shrink with the degree of context parallelism?

For each kind and degree, ranks on this machine run the forward of a decoder on rows of packed documents and count the
bytes that autograd keeps for the backward: every distinct storage once, parameters aside. That is what activation
checkpointing would otherwise have to save, and what limits the length of a row.

    python benchmarks/context_memory.py [--seq-len 4096] [--degrees 1 2 4] [--json FILE]
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from torchtitan import torch_api
from torchtitan.batch import Batch
from torchtitan.models.layers.init import init_weights
from torchtitan.models.llama3.sizes import llama3
from torchtitan.models.model import Model
from torchtitan.parallel.context import Kind, apply_context_parallel, cut


def packed_rows(n_rows: int, seq_len: int, vocab_size: int, n_documents: int = 3) -> Batch:
    """Rows of random tokens in ``n_documents`` documents of about the same length."""
    length = -(-seq_len // n_documents)
    place = torch.arange(seq_len).expand(n_rows, -1)
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randint(vocab_size, (n_rows, seq_len), generator=generator),
        "positions": place % length,
        "document_ids": place // length,
    }


def saved_bytes(config: Model.Config, kind: Kind, n_rows: int, seq_len: int) -> int:
    """Bytes kept for the backward on this rank, with the ranks of the default process group sharing each row."""
    mesh = torch_api.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = config.build()
    init_weights(model, seed=0)
    apply_context_parallel(model, mesh, kind)
    batch = cut(packed_rows(n_rows, seq_len, config.vocab_size), mesh, kind)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameters:
            kept[storage] = (
                tensor  # which keeps the storage alive, so that its address stays its own
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states = model(*(batch[name] for name in model.batch_fields))
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    hidden_states.sum().backward()  # it must also be enough
    return total


def _rank(rank: int, world_size: int, folder: str, config: Model.Config, *args: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = saved_bytes(config, *args)
    Path(folder, str(rank)).write_text(str(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(config: Model.Config, kind: Kind, degree: int, n_rows: int, seq_len: int) -> list[int]:
    """`saved_bytes` of each of ``degree`` new processes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (degree, folder, config, kind, n_rows, seq_len), nprocs=degree)
        return [int(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(degree)]


def table(found: Sequence[dict[str, Any]], degrees: Sequence[int]) -> str:
    """One line a kind, one column a degree: MiB, and how many times less than at the first degree."""
    lines = [f"{'MiB a rank':<12}" + "".join(f"{f'cp={degree}':>16}" for degree in degrees)]
    for kind in get_args(Kind):
        values = [max(f["bytes_by_rank"]) for f in found if f["kind"] == kind]
        cells = [f"{value / 2**20:8.1f} ({values[0] / value:4.2f}x)" for value in values]
        lines.append(f"{kind:<12}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table and optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    config = llama3("debug")
    found = [
        {
            "kind": kind,
            "cp": degree,
            "bytes_by_rank": measure(config, kind, degree, 1, args.seq_len),
        }
        for kind in get_args(Kind)
        for degree in args.degrees
    ]
    print(f"activations kept for the backward, llama3 debug, one row of {args.seq_len} tokens")
    print(table(found, args.degrees))
    if args.json:
        result = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "seq_len": args.seq_len,
            "found": found,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
