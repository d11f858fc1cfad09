import xml.etree.ElementTree

from tests.unit.metrics.runs import RUN
from torchtitan.metrics import Jsonl, Plots


def series(folder):
    sink = Jsonl(folder / "metrics.jsonl", 0)
    for step in range(1, 41):
        row = {"global_step": step, "loss": 8 / step, "lr": 1e-3, "grad_norm": 1 + 1 / step}
        if step % 10 == 0:
            row |= {"tokens_per_second": 1e4 + step, "peak_memory_gib": 0.5}
        sink.log([row])
    sink.log([{"global_step": 40, "validation_loss": 0.4}])
    sink.close()


def test_png_of_the_curves(tmp_path):
    series(tmp_path)
    plots = Plots.Config().build(folder=tmp_path, run=RUN)
    plots.log([{"global_step": 1}])
    plots.close()
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 20_000


def test_svg_of_the_curves(tmp_path):
    series(tmp_path)
    Plots.Config(format="svg").build(folder=tmp_path, run=RUN).close()
    root = xml.etree.ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert root.tag.endswith("svg")
    assert not (tmp_path / "curves.png").exists()


def test_no_picture_without_data(tmp_path):
    Plots.Config().build(folder=tmp_path, run=RUN).close()
    (tmp_path / "metrics.jsonl").touch()
    Plots.Config().build(folder=tmp_path, run=RUN).close()
    assert not (tmp_path / "curves.png").exists()


def test_one_row_is_enough(tmp_path):
    sink = Jsonl(tmp_path / "metrics.jsonl", 0)
    sink.log([{"global_step": 1, "loss": float("nan")}])
    sink.close()
    Plots.Config().build(folder=tmp_path, run=RUN).close()
    assert (tmp_path / "curves.png").exists()


def test_missing_package_is_a_problem(monkeypatch):
    monkeypatch.setattr("torchtitan.metrics.sinks.plots.is_installed", lambda name: False)
    (problem,) = Plots.Config().check()
    assert str(problem) == (
        "enabled=True: the package 'matplotlib' is not installed; run: pip install matplotlib, or set it to False"
    )
    assert not list(Plots.Config(enabled=False).check())
