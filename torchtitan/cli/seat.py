"""This machine's place among those that train together, and the store at which all ranks meet."""

from dataclasses import dataclass
from typing import Any

from torchtitan import torch_api
from torchtitan.config.configurable import Problem
from torchtitan.environment import Meeting
from torchtitan.errors import DistributedError

TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a launcher stands.

    Attributes:
        node_rank: number of this machine, from 0.
        address: of the machine that holds the store.
        port: of the store.
        store_is_served: whether a launcher holds the store already; else rank 0 does.
        held: what must live as long as the ranks do.
    """

    node_rank: int
    address: str
    port: int
    store_is_served: bool
    held: Any

    def close(self) -> None:
        """Leave the meeting."""
        if hasattr(self.held, "shutdown"):
            self.held.shutdown()


def check_meeting(nnodes: int, meeting: Meeting) -> list[Problem]:
    """What keeps ``nnodes`` machines from finding each other."""
    if nnodes == 1:
        return []
    if meeting.endpoint is None:
        remedy = "set MASTER_ADDR and NODE_RANK, or RDZV_ENDPOINT, on every machine"
        return [Problem("--nnodes", nnodes, "the machines have no place to meet", remedy)]
    if meeting.backend == "static" and (meeting.node_rank is None or meeting.node_rank >= nnodes):
        remedy = f"set it to the number of this machine, 0 to {nnodes - 1}"
        reason = f"is no number of one of {nnodes} machines"
        return [Problem("NODE_RANK", meeting.node_rank, reason, remedy)]
    return []


def take_seat(nnodes: int, meeting: Meeting) -> Seat:
    """Meet the other machines; alone, open a store on a free local port.

    Raises:
        DistributedError: if they do not come in time.
    """
    if nnodes == 1:
        store = torch_api.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return Seat(0, "127.0.0.1", store.port, True, store)
    parameters = torch_api.rendezvous.RendezvousParameters(
        backend=meeting.backend,
        endpoint=meeting.endpoint or "",
        run_id=meeting.run_id,
        min_nodes=nnodes,
        max_nodes=nnodes,
        rank=meeting.node_rank,
        timeout=TIMEOUT_S,
    )
    try:
        handler = torch_api.rendezvous.rendezvous_handler_registry.create_handler(parameters)
        info = handler.next_rendezvous()
        place = info.bootstrap_store_info
        if place is None:
            raise RuntimeError(f"the backend {meeting.backend} names no store for the ranks")
    except (torch_api.rendezvous.RendezvousError, RuntimeError, ValueError) as error:
        raise DistributedError(
            f"{nnodes} machines did not meet at {meeting.endpoint} ({str(error).strip().partition(chr(10))[0]}); "
            "check that each runs the same command, with its own NODE_RANK, and can reach that address"
        ) from error
    return Seat(info.rank, place.master_addr, place.master_port, handler.use_agent_store, handler)
