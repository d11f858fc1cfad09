import json
import logging
import math

from torchtitan.metrics.sinks.base import GeneratedText
from torchtitan.metrics.sinks.jsonl import Jsonl, read_rows


def write(path, steps, start_step=0):
    sink = Jsonl(path, start_step)
    sink.log([{"global_step": step, "loss": 1.0 / step} for step in steps])
    sink.close()


def test_numbers_survive_in_full_precision(tmp_path):
    path = tmp_path / "metrics.jsonl"
    numbers = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 7]
    sink = Jsonl(path, 0)
    sink.log([{"global_step": i, "x": number} for i, number in enumerate(numbers)])
    assert [repr(row["x"]) for row in read_rows(path)] == [repr(number) for number in numbers]
    sink.close()


def test_rows_after_the_resumed_step_are_removed(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11))
    with caplog.at_level(logging.INFO):
        write(path, range(7, 9), start_step=6)
    assert [row["global_step"] for row in read_rows(path)] == list(range(1, 9))
    assert "removed 4 rows after step 6" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_new_run_in_an_old_folder_starts_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    write(path, [1], start_step=0)
    assert len(read_rows(path)) == 1


def test_torn_last_line_is_left_out_and_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with path.open("ab") as file:
        file.write(b'{"global_step": 4, "lo\xc3')
    assert [row["global_step"] for row in read_rows(path)] == [1, 2, 3]
    write(path, [4], start_step=3)
    assert [row["global_step"] for row in read_rows(path)] == [1, 2, 3, 4]
    assert path.read_text(encoding="utf-8").count("\n") == 4


def test_null_is_read_as_nan_and_stays_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = Jsonl(path, 0)
    sink.log([{"global_step": 1, "loss": math.inf}])
    sink.close()
    assert math.isnan(read_rows(path)[0]["loss"])
    Jsonl(path, 1).close()
    assert path.read_text(encoding="utf-8") == '{"global_step": 1, "loss": null}\n'


def test_texts_have_a_file_of_their_own_that_goes_on_at_the_resumed_step(tmp_path):
    def write_texts(start_step, steps):
        sink = Jsonl(tmp_path / "metrics.jsonl", start_step)
        for step in steps:
            sink.log_texts(step, [GeneratedText("wer?", f"nach {step} \u2028é\n", "stop")])
        sink.close()

    write(tmp_path / "metrics.jsonl", [1])
    assert not (tmp_path / "samples.jsonl").exists()
    write_texts(0, [2, 4, 6])
    write_texts(4, [6, 8])
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert [json.loads(line) for line in lines] == [
        {
            "global_step": step,
            "prompt": "wer?",
            "text": f"nach {step} \u2028é\n",
            "finish_reason": "stop",
        }
        for step in (2, 4, 6, 8)
    ]
