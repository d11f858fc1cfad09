import io
import json
import logging
import math
import struct
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from tests.unit.metrics.runs import RUN
from torchtitan.errors import ConfigError
from torchtitan.metrics import Console, Metrics, Plots, Probe, Sink, WeightNorm, read_rows

PERFORMANCE = {
    "window_steps",
    "seconds_per_step",
    "tokens_per_second",
    "tflops_per_device",
    "peak_memory_gib",
    "data_wait_fraction",
    "eta_s",
}


def quiet(**settings):
    return Metrics.Config(
        plots=Plots.Config(enabled=False), console=Console.Config(enabled=False), **settings
    )


def values(step):
    torch.manual_seed(step)
    return {
        "loss": torch.rand(()),
        "grad_norm": torch.rand((), dtype=torch.bfloat16),
        "lr": 1e-3 / step,
        "data_wait_s": 0.001 * step,
    }


def bits(number):
    return struct.pack("<d", float(number))


class CountsSyncs(torch.Tensor):
    """A tensor that writes down every call that would make the host wait for a device."""

    SYNCS = frozenset(
        {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__array__"}
    )
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__name__
        to_cpu = name == "to" and any(str(a) == "cpu" for a in args[1:])
        if name in cls.SYNCS or to_cpu:
            cls.seen.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_sync_counter_counts():
    CountsSyncs.seen.clear()
    tensor = torch.ones(1).as_subclass(CountsSyncs)
    tensor.item()
    float(tensor)
    tensor.to("cpu")
    assert len(CountsSyncs.seen) >= 3


def test_one_sync_at_logged_steps_and_none_between(tmp_path):
    metrics = quiet(every_n_steps=5).build(folder=tmp_path, run=RUN)
    CountsSyncs.seen.clear()
    syncs = []
    for step in range(1, 26):
        tensors = {
            name: v.as_subclass(CountsSyncs) if isinstance(v, torch.Tensor) else v
            for name, v in values(step).items()
        }
        before = len(CountsSyncs.seen)
        metrics.record(step, tensors)
        syncs.append(len(CountsSyncs.seen) - before)
    metrics.close()
    logged = {1, 5, 10, 15, 20, 25}
    assert syncs == [1 if step in logged else 0 for step in range(1, 26)]
    assert set(CountsSyncs.seen) == {"tolist"}


def test_every_step_has_a_row_equal_to_what_was_recorded_bit_for_bit(tmp_path):
    metrics = quiet(every_n_steps=10).build(folder=tmp_path, run=RUN)
    for step in range(1, 26):
        metrics.record(step, values(step))
    metrics.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["global_step"] for row in rows] == list(range(1, 26))
    for row in rows:
        for name, value in values(row["global_step"]).items():
            assert bits(row[name]) == bits(value), (row["global_step"], name)
        logged = row["global_step"] in (1, 10, 20, 25)
        assert (set(row) >= PERFORMANCE) == logged
        assert logged or not set(row) & PERFORMANCE
        assert "mfu" not in row
    assert [row["window_steps"] for row in rows if "window_steps" in row] == [1, 9, 10, 5]
    wait = rows[9]["data_wait_fraction"] * rows[9]["seconds_per_step"] * 9
    assert wait == pytest.approx(0.001 * sum(range(2, 11)))


def test_recorded_tensors_may_be_overwritten_afterwards(tmp_path):
    metrics = quiet().build(folder=tmp_path, run=replace(RUN, total_steps=3))
    total = torch.zeros(())
    for step in (1, 2, 3):
        total += 1
        metrics.record(step, {"loss": total})
    metrics.close()
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]


def test_metric_that_is_not_one_number_is_refused(tmp_path):
    metrics = quiet().build(folder=tmp_path, run=RUN)
    with pytest.raises(
        ValueError, match=r"metric 'loss' has shape \(3,\); .* reduce it \(sum, mean\) first"
    ):
        metrics.record(1, {"loss": torch.zeros(3)})
    metrics.close()


def test_resume_continues_one_clean_series(tmp_path):
    def run_steps(first, last, start_step):
        run = replace(RUN, start_step=start_step)
        metrics = quiet(every_n_steps=4).build(folder=tmp_path, run=run)
        for step in range(first, last + 1):
            metrics.record(step, values(step))
        return metrics

    interrupted = run_steps(1, 11, 0)
    interrupted.flush()  # as before a checkpoint at step 11, which was not completed
    resumed = run_steps(6, 25, 5)
    resumed.close()
    interrupted.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["global_step"] for row in rows] == list(range(1, 26))
    assert all(bits(row["loss"]) == bits(values(row["global_step"])["loss"]) for row in rows)


def test_first_step_after_a_resume_is_logged(tmp_path):
    metrics = quiet(every_n_steps=10).build(folder=tmp_path, run=replace(RUN, start_step=12))
    metrics.record(13, values(13))
    assert read_rows(tmp_path / "metrics.jsonl")[0]["window_steps"] == 1
    metrics.close()


def test_close_writes_the_steps_after_the_last_logged_one(tmp_path):
    metrics = quiet(every_n_steps=10).build(folder=tmp_path, run=RUN)
    for step in (1, 2, 3):
        metrics.record(step, values(step))
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    metrics.close()
    metrics.close()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3


def test_close_survives_a_device_that_is_lost(tmp_path, caplog):
    class Lost(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ == "tolist":
                raise RuntimeError("CUDA error: device lost")
            return super().__torch_function__(func, types, args, kwargs or {})

    metrics = quiet().build(folder=tmp_path, run=RUN)
    metrics.record(1, values(1))
    metrics.record(2, {"loss": torch.zeros(()).as_subclass(Lost)})
    metrics.close()
    assert "the metrics of the last 1 steps are lost: RuntimeError('CUDA error" in caplog.text


def test_validation_rows_come_after_the_steps_they_follow(tmp_path):
    metrics = quiet(every_n_steps=10).build(folder=tmp_path, run=RUN)
    metrics.log_validation(0, {"loss": 8.5})
    for step in range(1, 6):
        metrics.record(step, values(step))
    metrics.log_validation(5, {"loss": 2.5, "validation_tokens": 100})
    metrics.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows[0] == {"global_step": 0, "validation_loss": 8.5}
    assert rows[-1] == {"global_step": 5, "validation_loss": 2.5, "validation_tokens": 100.0}
    assert [row["global_step"] for row in rows] == [0, 1, 2, 3, 4, 5, 5]


def test_other_ranks_write_nothing(tmp_path):
    metrics = quiet(every_n_steps=1).build(folder=tmp_path / "run", run=replace(RUN, rank=1))
    calls = []
    metrics.add("anything", lambda: float(len(calls.append(1) or calls)))
    metrics.record(1, values(1))
    metrics.log_validation(1, {"loss": 1.0})
    metrics.close()
    assert calls == [1]  # measured everywhere: it may be a collective
    assert not (tmp_path / "run").exists()


def test_added_metrics_and_probes_are_measured_at_logged_steps_only(tmp_path):
    model = nn.Linear(3, 2)
    calls = []
    config = quiet(
        every_n_steps=2, probes=[WeightNorm.Config(pattern="policy.bias", name="bias_norm")]
    )
    metrics = config.build(folder=tmp_path, run=RUN, models={"policy": model})
    metrics.add("bias_sum", lambda: calls.append(1) or model.bias.sum())
    for step in (1, 2, 3):
        metrics.record(step, values(step))
    metrics.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert ["bias_norm" in row for row in rows] == [True, True, False]
    assert len(calls) == 2
    assert rows[0]["bias_sum"] == model.bias.sum().item()
    assert rows[0]["bias_norm"] == pytest.approx(model.bias.norm().item())


@pytest.mark.parametrize("name", ["mfu", "global_step", "twice"])
def test_added_name_must_be_free(tmp_path, name):
    metrics = quiet().build(folder=tmp_path, run=RUN)
    metrics.add("twice", lambda: 1.0)
    with pytest.raises(ValueError, match=f"a metric named '{name}' exists already; choose another"):
        metrics.add(name, lambda: 1.0)
    metrics.close()


def test_added_name_that_the_run_records_is_refused(tmp_path):
    metrics = quiet().build(folder=tmp_path, run=RUN)
    metrics.add("loss", lambda: 1.0)
    with pytest.raises(ValueError, match=r"metrics \['loss'\] are recorded by the run .* rename"):
        metrics.record(1, values(1))
    metrics.close()


def test_probes_need_models(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics.probes has 1 entries .* pass models="):
        quiet(probes=[WeightNorm.Config()]).build(folder=tmp_path, run=RUN)


class FullDisk(Sink):
    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        fail_at_start: bool = False

        def build(self, *, folder, run):
            if self.fail_at_start:
                raise OSError("no route to host")
            return FullDisk()

    def __init__(self):
        self.closed = 0

    def log(self, rows):
        if rows[-1]["global_step"] == 2:
            raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


def test_failing_sink_is_dropped_with_one_warning(tmp_path, caplog):
    metrics = quiet(every_n_steps=1, sinks=[FullDisk.Config()]).build(folder=tmp_path, run=RUN)
    for step in range(1, 6):
        metrics.record(step, values(step))
    metrics.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "metrics.sinks.0 failed and gets no more metrics: OSError(28" in warnings[0]
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 5


def test_sink_that_fails_at_start_or_at_the_end_is_reported(tmp_path, caplog):
    sinks = [FullDisk.Config(fail_at_start=True), FullDisk.Config()]
    metrics = quiet(sinks=sinks).build(folder=tmp_path, run=RUN)
    assert "metrics.sinks.0 could not start and is left out: OSError('no route" in caplog.text
    metrics.close()
    assert "metrics.sinks.1 failed while closing: OSError(28" in caplog.text


def test_failing_jsonl_is_reported_and_training_goes_on(tmp_path, caplog):
    metrics = quiet(every_n_steps=1).build(folder=tmp_path, run=RUN)
    metrics._sinks["metrics.jsonl"]._file.close()  # every write fails from here
    for step in (1, 2):
        metrics.record(step, values(step))
    metrics.close()
    assert caplog.text.count("metrics.jsonl failed and gets no more metrics") == 1


def test_non_finite_numbers_are_null_in_the_file(tmp_path):
    metrics = quiet(every_n_steps=1).build(folder=tmp_path, run=RUN)
    metrics.record(1, {"loss": torch.tensor(math.inf), "grad_norm": torch.tensor(math.nan)})
    metrics.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert math.isnan(read_rows(tmp_path / "metrics.jsonl")[0]["loss"])


def test_mfu_uses_the_given_peak_even_on_cpu(tmp_path):
    metrics = quiet(peak_tflops=2.0).build(folder=tmp_path, run=RUN)
    metrics.record(1, values(1))
    metrics.close()
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["mfu"] == row["tflops_per_device"] / 2.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0: is less than 1; set 1 or more"),
        (
            {"peak_tflops": -1.0},
            "peak_tflops=-1.0: is not above 0; set the device's dense TFLOP/s, or None",
        ),
        (
            {"peak_tflops": math.nan},
            "peak_tflops=nan: is not above 0; set the device's dense TFLOP/s, or None",
        ),
    ],
)
def test_ranges(settings, text):
    assert [str(problem) for problem in Metrics.Config(**settings).check()] == [text]
    assert not list(Metrics.Config().check())


def test_all_settings_are_operational():
    assert {field.name for field in fields(Metrics.Config)} == Metrics.Config.OPERATIONAL


def test_default_run_leaves_series_picture_and_lines(tmp_path):
    stream = io.StringIO()
    metrics = Metrics.Config().build(folder=tmp_path, run=RUN, stream=stream)
    for step in range(1, 26):
        metrics.record(step, values(step))
    metrics.close()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "curves.png"}
    assert stream.getvalue().count("\n") == 4


def test_base_classes_name_what_is_missing(tmp_path):
    with pytest.raises(NotImplementedError, match=r"Probe\.Config must define build"):
        Probe.Config().build()
    with pytest.raises(NotImplementedError, match=r"Probe must define __call__"):
        Probe()({})
    with pytest.raises(NotImplementedError, match=r"Sink\.Config must define build"):
        Sink.Config().build(folder=tmp_path, run=RUN)
    with pytest.raises(NotImplementedError, match=r"Sink must define log"):
        Sink().log([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_sync_on_a_gpu_between_logged_steps(tmp_path):
    metrics = quiet(every_n_steps=10).build(folder=tmp_path, run=replace(RUN, device_type="cuda"))
    tensors = [torch.rand((), device="cuda") for _ in range(10)]
    metrics.record(1, {"loss": tensors[0]})
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 10):
            metrics.record(step, {"loss": tensors[step], "lr": 1.0})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    metrics.close()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 9
