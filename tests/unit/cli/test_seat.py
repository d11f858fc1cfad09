import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtitan.cli import seat
from torchtitan.cli.seat import check_meeting, take_seat
from torchtitan.environment import Meeting
from torchtitan.errors import DistributedError


def test_one_machine_needs_no_meeting_and_gets_a_free_port():
    nowhere = Meeting("static", None, "run", None)
    assert check_meeting(1, nowhere) == []
    first, second = take_seat(1, nowhere), take_seat(1, nowhere)
    assert (first.node_rank, first.address, first.store_is_served) == (0, "127.0.0.1", True)
    assert first.port != second.port
    first.close()


@pytest.mark.parametrize(
    ("meeting", "expected"),
    [
        (
            Meeting("static", None, "run", 0),
            "--nnodes=2: the machines have no place to meet; "
            "set MASTER_ADDR and NODE_RANK, or RDZV_ENDPOINT, on every machine",
        ),
        (
            Meeting("static", "h:1", "run", None),
            "NODE_RANK=None: is no number of one of 2 machines; set it to the number of this machine, 0 to 1",
        ),
        (
            Meeting("static", "h:1", "run", 2),
            "NODE_RANK=2: is no number of one of 2 machines; set it to the number of this machine, 0 to 1",
        ),
    ],
)
def test_what_keeps_machines_from_meeting(meeting, expected):
    assert [str(problem) for problem in check_meeting(2, meeting)] == [expected]


def test_a_meeting_that_can_happen():
    assert check_meeting(2, Meeting("c10d", "h:1", "run", None)) == []
    assert check_meeting(2, Meeting("static", "h:1", "run", 1)) == []


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_that_meet_agree_on_their_numbers_and_on_the_store(backend):
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    numbers = [None, None] if backend == "c10d" else [0, 1]
    meetings = [Meeting(backend, endpoint, "run", number) for number in numbers]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda meeting: take_seat(2, meeting), meetings)
    assert {first.node_rank, second.node_rank} == {0, 1}
    assert (first.address, first.port) == (second.address, second.port)
    assert first.store_is_served
    first.close()
    second.close()


def test_machines_that_do_not_come_are_told_of(monkeypatch):
    monkeypatch.setattr(seat, "TIMEOUT_S", 1)
    message = r"2 machines did not meet at 127\.0\.0\.1:0 \(.*\); check that each runs"
    with pytest.raises(DistributedError, match=message):
        take_seat(2, Meeting("static", "127.0.0.1:0", "run", 0))
    with pytest.raises(DistributedError, match=r"did not meet at h:1 \(.*nothing"):
        take_seat(2, Meeting("nothing", "h:1", "run", 0))
