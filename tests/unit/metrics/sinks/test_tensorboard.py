from dataclasses import replace

import pytest

from tests.unit.metrics.runs import RUN
from torchtitan.errors import ConfigError
from torchtitan.metrics import GeneratedText, TensorBoard

# the package tensorboard warns about its own use of older APIs
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def write(folder, steps, start_step=0):
    sink = TensorBoard.Config(enabled=True).build(
        folder=folder, run=replace(RUN, start_step=start_step)
    )
    sink.log([{"global_step": step, "loss": 1.0 / step} for step in steps])
    sink.close()


def test_event_file_is_readable_and_a_resume_hides_later_steps(tmp_path):
    write(tmp_path, [1, 2, 4, 8])
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 0.5), (4, 0.25), (8, 0.125)]}
    write(tmp_path, [4], start_step=2)
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 0.5), (4, 0.25)]}


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.metrics.sinks.tensorboard.is_installed", lambda name: False)
    monkeypatch.setattr("torchtitan.optional.is_installed", lambda name: False)
    config = TensorBoard.Config(enabled=True)
    (problem,) = config.check()
    assert str(problem) == (
        "enabled=True: the package 'tensorboard' is not installed; run: pip install 'torchtitan[tensorboard]'"
    )
    assert not list(TensorBoard.Config().check())
    with pytest.raises(ConfigError, match=r"metrics.tensorboard needs .*torchtitan\[tensorboard\]"):
        config.build(folder=tmp_path, run=RUN)


def test_texts_are_text(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoard.Config(enabled=True).build(folder=tmp_path, run=RUN)
    sink.log_texts(3, [GeneratedText("a\nb", "c *d*", "stop"), GeneratedText("e", "f", "length")])
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/1/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val == [b"    a\n    b\n\n    c *d*\n\nstop"]
    assert events.Tensors("samples/2/text_summary")
