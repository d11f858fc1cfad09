import io
import logging
from dataclasses import replace

import pytest

from tests.unit.metrics.runs import RUN
from torchtitan.metrics import Console, GeneratedText
from torchtitan.metrics.sinks import console as console_module

ROW = {
    "global_step": 10,
    "loss": 2.34567,
    "lr": 3e-4,
    "grad_norm": 1.2345,
    "tokens_per_second": 12_345.6,
    "tflops_per_device": 1.25,
    "mfu": 0.4512,
    "peak_memory_gib": 3.217,
    "eta_s": 3_725.0,
    "entropy": 0.5,
}
TEXT = (
    "10/25  40% | loss 2.3457 | lr 3.00e-04 | grad norm 1.234 | 12.3k tok/s | ETA 1h 02m | "
    "1.25 TFLOP/s | MFU 45.1% | 3.22 GiB"
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True

    def screen(self):
        """The lines that a terminal would show."""
        lines = []
        for line in self.getvalue().split("\n"):
            cells = []
            for part in line.replace("\x1b[32m", "").replace("\x1b[0m", "").split("\r"):
                cells[: len(part)] = part
            lines.append("".join(cells).rstrip())
        return lines


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(console_module, "no_color", lambda: False)


def build(tmp_path, stream, run=RUN, **fields):
    return Console.Config(**fields).build(folder=tmp_path, run=run, stream=stream)


def test_plain_lines_elsewhere(tmp_path):
    stream = io.StringIO()
    console = build(tmp_path, stream)
    console.log([{"global_step": 9, "loss": 1.0}, ROW])
    console.log([{"global_step": 10, "validation_loss": 2.5}])
    console.log([{"global_step": 11, "loss": 1.0}])  # flushed, not logged
    console.close()
    assert stream.getvalue() == f"step {TEXT}\nstep 10/25  40% | validation loss 2.5000\n"


def test_bar_on_a_terminal(tmp_path):
    stream = Terminal()
    console = build(tmp_path, stream)
    console.log([{**ROW, "global_step": 5, "loss": 9.9}])
    console.log([ROW])
    assert stream.screen() == ["━" * 8 + "─" * 12 + " " + TEXT]
    console.close()
    assert len(stream.screen()) == 2
    assert "\x1b[32m" in stream.getvalue()


def test_no_color_means_plain_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "no_color", lambda: True)
    stream = Terminal()
    console = build(tmp_path, stream)
    console.log([ROW])
    console.close()
    assert stream.getvalue() == f"step {TEXT}\n"


def test_bar_that_is_asked_for_has_no_escape_codes_without_color(tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "no_color", lambda: True)
    stream = Terminal()
    console = build(tmp_path, stream, style="bar")
    console.log([ROW])
    console.close()
    assert "\r" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_narrow_terminal_cuts_the_line(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    console = build(tmp_path, stream)
    console.log([ROW])
    console.close()
    assert len(stream.screen()[0]) <= 59
    assert "loss 2.34" in stream.screen()[0]


def test_ascii_where_the_stream_has_no_unicode(tmp_path):
    stream = Terminal()
    stream.encoding = "ascii"
    console = build(tmp_path, stream)
    console.log([ROW])
    console.close()
    assert stream.screen()[0].startswith("########............ 10/25")
    assert stream.getvalue().isascii()


@pytest.mark.parametrize(("style", "bar"), [("lines", False), ("bar", True), ("auto", True)])
def test_style(tmp_path, style, bar):
    stream = Terminal()
    console = build(tmp_path, stream, style=style)
    console.log([ROW])
    console.close()
    assert ("\r" in stream.getvalue()) == bar


@pytest.mark.parametrize("owner", ["", "torchtitan"])
def test_log_records_and_validations_move_up_above_the_bar(owner, tmp_path, monkeypatch):
    """Whether the handler is the application's, or the one that a run gives the package's own logger."""
    stream = Terminal()
    root, log = logging.getLogger(owner), logging.getLogger(f"{owner or 'a'}.test_console")
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", not owner)
    handlers = list(root.handlers)
    handler = logging.StreamHandler(stream)
    root.addHandler(handler)
    try:
        console = build(tmp_path, stream)
        log.warning("before the bar")
        console.log([ROW])
        log.warning("saved")
        console.log([{"global_step": 10, "validation_loss": 2.5}])
        console.close()
        log.warning("done")
    finally:
        root.removeHandler(handler)
    assert root.handlers == handlers
    bar = "━" * 8 + "─" * 12 + " " + TEXT
    assert stream.screen() == [
        "before the bar",
        "saved",
        "step 10/25  40% | validation loss 2.5000",
        bar,
        "done",
        "",
    ]


def test_log_records_survive_a_terminal_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = Terminal()
    console = build(tmp_path, stream)
    console.log([ROW])
    stream.close()
    logging.getLogger("test_console").warning("still running")
    with pytest.raises(ValueError, match="closed file"):
        console.close()
    for owner in ("", "torchtitan"):
        handlers = logging.getLogger(owner).handlers
        assert not any(isinstance(h, console_module._Callback) for h in handlers)


def test_further_metrics_are_shown_by_name(tmp_path):
    stream = io.StringIO()
    console = build(tmp_path, stream, show=["entropy", "absent"])
    console.log([ROW])
    assert stream.getvalue().endswith("3.22 GiB | entropy 0.5\n")
    console.close()


def test_mfu_is_not_shown_when_unknown(tmp_path):
    stream = io.StringIO()
    console = build(tmp_path, stream, run=replace(RUN, total_steps=10_000_000))
    row = {name: value for name, value in ROW.items() if name != "mfu"}
    console.log([{**row, "eta_s": 59.6, "tokens_per_second": 2.5e6}])
    console.close()
    assert "MFU" not in stream.getvalue()
    assert "| 2.5M tok/s | ETA 1m 00s |" in stream.getvalue()


def test_default_stream_is_stderr(tmp_path, capsys):
    console = build(tmp_path, None)
    console.log([{**ROW, "tokens_per_second": 12.0, "eta_s": 3.0}])
    console.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "| 12 tok/s | ETA 3s |" in captured.err


def test_texts_stand_below_their_prompt_whatever_they_hold():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    sink = Console.Config(style="lines").build(folder=None, run=RUN, stream=stream)
    sink.log_texts(5, [GeneratedText("who?\nyou", "é\x1b[2J\tx", "length")])
    sink.close()
    assert stream.buffer.getvalue().decode("ascii") == (
        "step 5/25  20% | sample 1 (length)\n  > who?\n  > you\n    \\xe9\\ufffd[2J   x\n"
    )
