import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.metrics.runs import RUN
from torchtitan.errors import ConfigError
from torchtitan.metrics import WandB

OFFLINE = """
import sys
from pathlib import Path
from torchtitan.metrics import GeneratedText, Metrics, RunInfo, WandB

folder, start = Path(sys.argv[1]), int(sys.argv[2])
run = RunInfo(recipe="debug", config={"training": {"seq_len": 8}, "hf_token": "hf_s3cret"}, total_steps=4,
    tokens_per_step_global=8, flops_per_token=1.0, world_size=1, rank=0, device_type="cpu", device_name="cpu",
    compute_dtype="float32", n_params=1, start_step=start)
config = Metrics.Config(wandb=WandB.Config(enabled=True, init={"project": "tests", "tags": ["a"]}))
config.plots.enabled = False
metrics = config.build(folder=folder, run=run)
for step in (start + 1, start + 2):
    metrics.record(step, {"loss": 1.0 / step})
metrics.log_texts(step, [GeneratedText("who?", "me", "stop")])
metrics.close()
"""


def offline(folder, start_step):
    root = Path(__file__).parents[4]
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-c", OFFLINE, str(folder), str(start_step)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_offline_run_and_its_resume(tmp_path):
    pytest.importorskip("wandb")
    done = offline(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    assert "could not start" not in done.stderr
    assert "gets no more metrics" not in done.stderr
    run_id = (tmp_path / "wandb_run_id.txt").read_text()
    (first,) = (tmp_path / "wandb").glob("offline-run-*")
    config = json.loads((first / "files" / "resolved_config.json").read_text())
    assert config == {"training": {"seq_len": 8}, "hf_token": "***"}
    (table,) = (first / "files" / "media" / "table").glob("samples_*.table.json")
    assert json.loads(table.read_text())["data"] == [[2, "who?", "me", "stop"]]
    assert (first / f"run-{run_id.strip()}.wandb").stat().st_size > 0
    done = offline(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "wandb_run_id.txt").read_text() == run_id
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hf_s3cret" not in path.read_bytes(), path


class FakeWandB:
    """Stands in for the package, to see what it is called with."""

    def __init__(self, folder):
        self.dir = str(folder)
        self.id = "abc123"
        self.rows = []
        self.calls = []

    def init(self, **keywords):
        if "nmae" in keywords:
            raise TypeError("init() got an unexpected keyword argument 'nmae'")
        self.calls.append(keywords)
        return self

    def define_metric(self, *args, **keywords):
        self.calls.append((args, keywords))

    def save(self, path, **keywords):
        self.calls.append(path)

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = FakeWandB(tmp_path)
    monkeypatch.setattr("torchtitan.metrics.sinks.wandb.require", lambda *a, **k: fake)
    return fake


def test_config_goes_to_the_overview_and_a_file_with_secrets_masked(tmp_path, fake):
    run = replace(RUN, config={"data": {"hf_token": "s3cret"}})
    sink = WandB.Config(init={"name": "mine"}).build(folder=tmp_path, run=run)
    keywords, metric, path = fake.calls
    assert keywords["name"] == "mine"
    assert keywords["dir"] == str(tmp_path)
    assert "resume" not in keywords
    assert keywords["config"]["data"] == {"hf_token": "***"}
    assert keywords["config"]["run"]["recipe"] == "llama3_debugmodel"
    assert metric == (("*",), {"step_metric": "global_step"})
    assert json.loads(Path(path).read_text()) == {"data": {"hf_token": "***"}}
    sink.log([{"global_step": 1, "loss": 1.0}, {"global_step": 2, "loss": 0.5}])
    sink.close()
    assert [row["global_step"] for row in fake.rows] == [1, 2]
    assert fake.calls[-1] == "finish"


def test_resume_uses_the_stored_id(tmp_path, fake):
    WandB.Config().build(folder=tmp_path, run=RUN)
    WandB.Config().build(folder=tmp_path, run=replace(RUN, start_step=5))
    resumed = fake.calls[3]
    assert (resumed["id"], resumed["resume"]) == ("abc123", "allow")


def test_unknown_keyword_is_a_config_error(tmp_path, fake):
    config = WandB.Config(enabled=True, init={"nmae": "x"})
    with pytest.raises(
        ConfigError, match=r"metrics.wandb.init=\{'nmae': 'x'\}: wandb.init refused"
    ):
        config.build(folder=tmp_path, run=RUN)


def test_problems(monkeypatch):
    monkeypatch.setattr("torchtitan.metrics.sinks.wandb.is_installed", lambda name: False)
    assert [str(p) for p in WandB.Config(enabled=True, init={"dir": "x"}).check()] == [
        "enabled=True: the package 'wandb' is not installed; run: pip install 'torchtitan[wandb]'",
        "init.dir=x: is set by the run; remove it",
    ]
    assert not list(WandB.Config().check())
