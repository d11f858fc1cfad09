"""What the process was given by its environment: the one module that reads ``os.environ``, and sets up logging."""

import logging
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torchtitan.errors import ConfigError

VARIABLES: dict[str, str] = {
    "NODE_RANK": "number of this machine, from 0, when several train together",
    "MASTER_ADDR, MASTER_PORT": "address of machine 0, and a free port there (default 29500)",
    "RDZV_ENDPOINT, RDZV_ID, RDZV_BACKEND": "instead of these: a rendezvous, as torchrun takes it",
    "OMP_NUM_THREADS": "CPU threads of each rank (default: the cores, shared evenly)",
    "TORCHTITAN_GRACE_S": "seconds that ranks get to save after SIGTERM or Ctrl-C (default 600)",
    "HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT": "store, login, no network, another hub: as huggingface_hub reads them",
    "NO_COLOR": "set: no colours and no progress bar",
}
"""Variables that a user may set -> meaning, as ``torchtitan --help`` lists them."""

_REPORT_FOLDER = "TORCHTITAN_REPORT_FOLDER"
_LAUNCHER_PID = "TORCHTITAN_LAUNCHER_PID"
_LOG_RANKS = "TORCHTITAN_LOG_RANKS"


def is_rank() -> bool:
    """Whether a launcher (ours, or torchrun) started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """Number of this process among all, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process on its machine, from 0; also of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def keep_tokenizers_to_one_thread(*, whatever_is_set: bool = False) -> None:
    """Texts are encoded one by one, which needs no threads.

    Args:
        whatever_is_set: also where the user chose otherwise. A forked process must: it would wait for threads that only its
            parent has.
    """
    if whatever_is_set or "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def no_color() -> bool:
    """Whether the user asked for plain output (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def grace_s() -> float:
    """Seconds between the request to stop and the end of the ranks that have not stopped."""
    return float(_integer("TORCHTITAN_GRACE_S") or 600)


def report_folder() -> Path | None:
    """Where this rank tells our launcher how it ended; None if another launcher started it, or none."""
    folder = os.environ.get(_REPORT_FOLDER)
    return Path(folder) if folder else None


def launcher_pid() -> int:
    """Process number of our launcher."""
    return int(os.environ[_LAUNCHER_PID])


@dataclass(frozen=True, slots=True)
class Meeting:
    """How several machines find each other.

    Attributes:
        backend: ``static`` (machine 0 is known) or a backend of torch's rendezvous, such as ``c10d``.
        endpoint: ``host:port``; None if nothing is set.
        run_id: names the run among those that meet at one endpoint.
        node_rank: number of this machine; None if the rendezvous gives it one.
    """

    backend: str
    endpoint: str | None
    run_id: str
    node_rank: int | None


def meeting() -> Meeting:
    """The meeting that ``RDZV_*`` or ``MASTER_ADDR``, ``MASTER_PORT`` and ``NODE_RANK`` describe."""
    environ, node_rank = os.environ, _integer("NODE_RANK")
    run_id = environ.get("RDZV_ID") or "torchtitan"
    if environ.get("RDZV_ENDPOINT"):
        backend = environ.get("RDZV_BACKEND") or "c10d"
        return Meeting(backend, environ["RDZV_ENDPOINT"], run_id, node_rank)
    address, port = environ.get("MASTER_ADDR"), _integer("MASTER_PORT") or 29500
    return Meeting("static", f"{address}:{port}" if address else None, run_id, node_rank)


def _integer(name: str) -> int | None:
    """A variable that holds a number; None if it is not set."""
    text = os.environ.get(name, "")
    if text and not text.isdigit():
        raise ConfigError(f"{name}={text}: is not a whole number; set one, or unset it")
    return int(text) if text else None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands; what ``torch.distributed`` reads from the environment."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_address: str
    master_port: int
    store_is_served: bool
    """Whether the launcher, and not rank 0, holds the store at that address."""


def rank_environment(
    place: RankPlace, report_folder: Path, log_ranks: Collection[int]
) -> dict[str, str]:
    """Environment of a rank: this process's own, and its place among the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // place.local_world_size)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(place.store_is_served),
        "TORCHELASTIC_RESTART_COUNT": "0",
        _REPORT_FOLDER: str(report_folder),
        _LAUNCHER_PID: str(os.getpid()),
        _LOG_RANKS: ",".join(map(str, sorted(log_ranks))),
    }


def setup_logging() -> None:
    """Log to stderr: from INFO on where this rank is one to show, else warnings alone, named by rank."""
    shown = os.environ.get(_LOG_RANKS, "0").split(",")
    prefix = f"rank {rank()} " if world_size() > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {prefix}%(levelname).1s %(message)s", "%H:%M:%S")
    )
    handler.setLevel(logging.INFO if str(local_rank()) in shown else logging.WARNING)
    logger = logging.getLogger("torchtitan")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
