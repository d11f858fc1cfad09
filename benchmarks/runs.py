"""Runs of the Trainer that benchmarks measure: in processes of their own, on rows of random tokens.

So nothing is downloaded, the peak that is measured is the run's own, and a run that ends out of memory ends alone.
`Ranks` is the side of the benchmark; a worker of ``benchmarks/workers/`` makes a `Run` and answers.
"""

# Shapes: B rows of this rank, S tokens of a row.

import copy
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import Worker
from torchtitan.batch import Batch
from torchtitan.config import from_dict, to_dict
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.layers.init import init_weights
from torchtitan.parallel.mesh import pick_device
from torchtitan.parallel.parallelize import materialise
from torchtitan.planner.tracker import MemoryTracker
from torchtitan.trainer import Trainer


def without_files(config: Trainer.Config) -> Trainer.Config:
    """A copy of a run that needs no download and writes nothing but its config: random weights, rows of `Run.rows`."""
    config = copy.deepcopy(config)
    config.data = Loader.Config(sources=[Embedded.Config()], n_workers=0)
    config.tokenizer = Tokenizer.Config()
    config.validation = config.samples = None
    if config.training.epochs is not None:  # the rows that are made here have no end
        config.training.steps, config.training.epochs = 1, None
    config.checkpoint.initial_load, config.checkpoint.export = "", None
    config.checkpoint.resume = "never"
    config.metrics.console.enabled = config.metrics.plots.enabled = False
    return config


class Ranks:
    """The processes of a run, which answer together; leave it with ``with``.

    Args:
        script: of ``benchmarks/workers/``; each rank runs it.
        setup: its argument.
        ranks: how many.
        threads: of each on the CPU; None for the cores, shared evenly.
        timeout_s: how long an answer may take.
    """

    def __init__(
        self,
        script: str,
        setup: dict[str, Any],
        *,
        ranks: int = 1,
        threads: int | None = None,
        timeout_s: float = 3600,
    ) -> None:
        threads = threads or max(1, (os.cpu_count() or 1) // ranks)
        together = {} if ranks == 1 else _meeting(ranks)
        self._workers = [
            Worker(
                f"rank {rank}" if ranks > 1 else "the run",
                script,
                setup,
                environ={
                    "OMP_NUM_THREADS": str(threads),
                    **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if together else {}),
                    **together,
                },
                timeout_s=timeout_s,
            )
            for rank in range(ranks)
        ]

    def ask(self, question: str, **arguments: Any) -> list[Any]:
        """Each rank's answer, by rank.

        Raises:
            PeerError: if one failed; the others, which may wait for it, are ended.
        """
        with ThreadPoolExecutor(len(self._workers)) as pool:
            answers = [pool.submit(w.ask, question, **arguments) for w in self._workers]
            done, others = wait(answers, return_when=FIRST_EXCEPTION)
            failed = [answer for answer in done if answer.exception()]
            if failed:
                for worker in self._workers if others else []:
                    worker.kill()
                failed[0].result()
        return [answer.result() for answer in answers]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _meeting(ranks: int) -> dict[str, str]:
    """Where the ranks meet: a free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":  # all ranks are on this machine
        meeting["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return meeting


class Steps(Protocol):
    """What can be measured: a run of the Trainer, or a loop written by hand."""

    device: torch.device

    def rows(self) -> list[Batch]:
        """The micro-batches of the next step."""
        ...

    def step(self, microbatches: list[Batch]) -> Tensor:
        """One optimizer step; its loss."""
        ...

    def held(self) -> Iterator[Tensor]:
        """Parameters and optimizer state."""
        ...


class Run:
    """A rank of a run, which steps when it is told.

    Args:
        config: of `without_files`; its model has a ``vocab_size``.
        folder: of the run.
    """

    def __init__(self, config: Trainer.Config, folder: str | Path) -> None:
        config.folder = str(folder)
        self.trainer = config.build()
        self.device = self.trainer.device
        self._random = Random(config, self.trainer.mesh.dp_rank, self.trainer.mesh.dp_world_size)

    @classmethod
    def of(cls, setup: dict[str, Any]) -> "Run":
        """The run of a worker's argument, made by `setup_of`."""
        config = from_dict(setup["config"])
        if not isinstance(config, Trainer.Config):
            raise TypeError(f"{type(config).__qualname__} is no Trainer.Config")
        return cls(config, setup["folder"])

    def rows(self) -> list[Batch]:
        """Random tokens, every one with a label, one document a row; others in each step and on each data rank."""
        return self._random.microbatches(self.trainer.micro_batch_rows, self.device)

    def step(self, microbatches: list[Batch]) -> Tensor:
        """See `Steps.step`."""
        return self.trainer.train_step(microbatches).loss

    def held(self) -> Iterator[Tensor]:
        """See `Steps.held`."""
        policy = self.trainer.models["policy"]
        yield from policy.model.parameters()
        yield from policy.optimizer.state_tensors().values()


def setup_of(config: Trainer.Config, folder: str | Path, **more: Any) -> dict[str, Any]:
    """What `Run.of` reads, and more for the worker."""
    return {"config": to_dict(config), "folder": str(folder), **more}


class Random:
    """Draws the rows of one data rank.

    Args:
        config: of the run.
        dp_rank: which one.
        dp_world_size: of how many.
    """

    def __init__(self, config: Trainer.Config, dp_rank: int, dp_world_size: int) -> None:
        training = config.training
        self._shape = training.global_batch_rows // dp_world_size, training.seq_len + 1
        self._vocab_size = config.model.vocab_size
        self._generator = torch.Generator().manual_seed(training.seed + 7919 * dp_rank)

    def microbatches(self, rows: int, device: torch.device) -> list[Batch]:
        """The next step's, of ``rows`` rows each."""
        tokens = torch.randint(self._vocab_size, self._shape, generator=self._generator)
        tokens = tokens.to(device)  # (B, S + 1)
        batch: dict[str, Tensor] = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "positions": torch.arange(tokens.shape[1] - 1, device=device).repeat(len(tokens), 1),
        }
        one_document: Any = {"document_ids": None}
        return [
            {name: field[start : start + rows] for name, field in batch.items()} | one_document
            for start in range(0, len(tokens), rows)
        ]


class BareLoop:
    """What one writes by hand: the same model, weights and rows, all logits at once, torch's fused AdamW.

    It has one micro-batch, one rank, no FSDP; weights and states are of the parameter type.

    Args:
        config: of the run that it is compared with.
    """

    def __init__(self, config: Trainer.Config) -> None:
        training = config.training
        self.device = pick_device(training.device)
        with torch.device("meta"):
            self.model = config.model.build().to(getattr(torch, training.parameter_dtype))
        materialise(self.model, self.device)
        init_weights(self.model, training.seed)
        self._max_norm = training.max_grad_norm or float("inf")
        self._random = Random(config, 0, 1)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.optimizer.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.optimizer.lr,
            betas=(0.9, 0.95),
            fused=True,
        )

    def rows(self) -> list[Batch]:
        """See `Run.rows`."""
        return self._random.microbatches(self._random._shape[0], self.device)

    def step(self, microbatches: list[Batch]) -> Tensor:
        """See `Steps.step`."""
        (batch,) = microbatches
        hidden_states = self.model(batch["tokens"], batch["positions"])
        logits = (hidden_states @ self.model.head.weight.t()).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        del hidden_states, logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def held(self) -> Iterator[Tensor]:
        """See `Steps.held`."""
        yield from self.model.parameters()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def timed(run: Steps, steps: int) -> tuple[float, float]:
    """Seconds a step of the next ``steps`` steps, the drawing of rows left out, and the last loss."""
    batches = [run.rows() for _ in range(steps)]
    wait_for(run.device)
    begin = time.perf_counter()
    *_, loss = [run.step(batch) for batch in batches]
    wait_for(run.device)
    return (time.perf_counter() - begin) / steps, loss.item()


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_of_tensors(run: Steps) -> int:
    """Most bytes of tensors in a step, which must not be the first.

    A GPU's allocator knows of all steps so far. On a CPU one step is counted; what kernels hold inside themselves is not
    seen.
    """
    if run.device.type == "cuda":
        return torch.cuda.max_memory_allocated(run.device)
    batches = run.rows()
    fields: list[Any] = [field for batch in batches for field in batch.values()]
    tracker = MemoryTracker([*run.held(), *(field for field in fields if field is not None)])
    with tracker:
        tracker.enter_phase("step")
        run.step(batches)
    return tracker.peak


def status(key: str) -> int:
    """Bytes of a line of this process's status (Linux): ``VmRSS`` is resident now, ``VmHWM`` was at most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def forget_peak() -> int:
    """Let ``VmHWM`` begin at what is resident now; return that."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return status("VmRSS")
