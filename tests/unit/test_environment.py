import logging

import pytest

from torchtitan import environment
from torchtitan.environment import Meeting, RankPlace, rank_environment, setup_logging
from torchtitan.errors import ConfigError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    names += ["RDZV_ENDPOINT", "RDZV_ID", "RDZV_BACKEND", "NO_COLOR", "OMP_NUM_THREADS"]
    for name in [*names, "TORCHTITAN_GRACE_S", "TORCHTITAN_REPORT_FOLDER", "TORCHTITAN_LOG_RANKS"]:
        monkeypatch.delenv(name, raising=False)


def test_alone(monkeypatch):
    assert not environment.is_rank()
    assert (environment.rank(), environment.local_rank(), environment.world_size()) == (0, 0, 1)
    assert environment.report_folder() is None
    assert environment.grace_s() == 600
    assert not environment.no_color()
    monkeypatch.setenv("NO_COLOR", "1")
    assert environment.no_color()


def test_a_rank_finds_itself_in_the_environment_that_it_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("MINE", "stays")
    place = RankPlace(5, 1, 8, 4, 1, "host", 1234, True)
    given = rank_environment(place, tmp_path, {1, 0})
    assert given["MINE"] == "stays"
    assert given["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("host", "1234")
    assert int(given["OMP_NUM_THREADS"]) >= 1
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment.is_rank()
    assert (environment.rank(), environment.local_rank(), environment.world_size()) == (5, 1, 8)
    assert environment.report_folder() == tmp_path


def test_threads_that_the_user_set_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    place = RankPlace(0, 0, 1, 1, 0, "host", 1, True)
    assert rank_environment(place, tmp_path, {0})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Meeting("static", None, "torchtitan", None)),
        (
            {"MASTER_ADDR": "h", "NODE_RANK": "1"},
            Meeting("static", "h:29500", "torchtitan", 1),
        ),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, Meeting("static", "h:1", "torchtitan", None)),
        ({"RDZV_ENDPOINT": "h:1", "RDZV_ID": "x"}, Meeting("c10d", "h:1", "x", None)),
        (
            {"RDZV_ENDPOINT": "h:1", "RDZV_BACKEND": "etcd-v2", "MASTER_ADDR": "other"},
            Meeting("etcd-v2", "h:1", "torchtitan", None),
        ),
    ],
)
def test_meeting(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.meeting() == expected


@pytest.mark.parametrize("name", ["NODE_RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "one")
    with pytest.raises(ConfigError, match=f"{name}=one: is not a whole number; set one, or unset"):
        environment.meeting()


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, ["I to all", "W to all"]),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, ["rank 1 W to all"]),
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHTITAN_LOG_RANKS": "1"},
            ["rank 1 I to all", "rank 1 W to all"],
        ),
    ],
)
def test_the_log_is_filtered_by_rank_at_the_handler(monkeypatch, capsys, variables, shown):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("torchtitan")
    before = (logger.handlers, logger.level, logger.propagate)
    try:
        setup_logging()
        logging.getLogger("torchtitan.some.module").info("to %s", "all")
        logging.getLogger("torchtitan.some.module").warning("to %s", "all")
    finally:
        logger.handlers, logger.level, logger.propagate = before
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[2] for line in lines] == shown
