import pytest

from torchtitan.cli.ending import Ending, run_command
from torchtitan.errors import CheckpointError, ConfigError, DataError, DistributedError, Preempted


def raiser(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad"), 2, "error: bad\n"),
        (DataError("bad"), 3, "error: bad\n"),
        (CheckpointError("bad"), 4, "error: bad\n"),
        (DistributedError("bad"), 6, "error: bad\n"),
        (Preempted("saved"), 7, "saved\n"),
        (KeyboardInterrupt(), 7, "interrupted before anything was started\n"),
        (
            RuntimeError(
                "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5. "
                "This is typically caused by a crash.\nmore"
            ),
            6,
            "error: a collective failed (Connection closed by peer [::1]:5); another rank died or hung: "
            "look for its message, then run the same command again to resume from the last checkpoint\n",
        ),
    ],
)
def test_a_known_error_is_one_sentence_and_its_code(capsys, error, code, text):
    assert run_command(raiser(error)) == code
    assert capsys.readouterr().err == text


def test_torchs_own_class_for_failed_collectives_is_known():
    class DistError(RuntimeError):
        pass

    assert Ending.of(DistError("NCCL says no")).code == 6


def test_any_other_error_shows_its_traceback(capsys):
    assert run_command(raiser(ZeroDivisionError("a bug"))) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("ZeroDivisionError: a bug\n")
    assert "in command" in text


def test_a_report_takes_the_place_of_the_terminal_and_the_first_one_stays(capsys, tmp_path):
    file = tmp_path / "0.json"
    assert Ending.read(file) is None
    assert run_command(raiser(DataError("first")), report=file) == 3
    assert run_command(raiser(ConfigError("second")), report=file) == 2
    assert Ending.read(file) == Ending(3, "first")
    assert capsys.readouterr().err == ""


def test_success_has_nothing_to_say(capsys, tmp_path):
    assert run_command(lambda: 0, report=tmp_path / "0.json") == 0
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
