"""What a user sees: the commands of the README, their output, files and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model.n-layers=1",
    "--model.dim=16",
    "--model.feed-forward.ffn-dim=16",
    "--training.seq-len=32",
    "--training.global-batch-rows=4",
    "--validation.steps=1",
    "--metrics.plots.enabled=False",
    "--data.n-workers=0",
]


def environment():
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "NO_COLOR": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(*arguments):
    return [sys.executable, "-m", "torchtitan.train", *SMALL, *arguments]


def train(*arguments, cwd):
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300
    )


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["global_step"]: row["loss"] for row in rows if "loss" in row}


def test_a_run_leaves_its_files_and_goes_on_with_more_steps(tmp_path):
    done = train("--training.steps=4", "--folder=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stderr
    run = tmp_path / "run"
    assert json.loads((run / "config.json").read_text(encoding="utf-8"))["training"]["steps"] == 4
    assert list(losses(run)) == [1, 2, 3, 4]
    assert (run / "checkpoints" / "step-00000004" / "manifest.json").exists()
    more = train("--training.steps=6", "--folder=run", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "resumed from" in more.stderr
    straight = train("--training.steps=6", "--folder=straight", cwd=tmp_path)
    assert straight.returncode == 0
    assert losses(run) == losses(tmp_path / "straight")


def test_four_ranks_have_the_losses_of_one(tmp_path):
    for n in (1, 4):
        done = train("--training.steps=4", f"--folder=n{n}", f"--ngpu={n}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "n4") == pytest.approx(losses(tmp_path / "n1"), rel=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_too_little_data_is_exit_3_with_counts(tmp_path, n):
    (tmp_path / "data.jsonl").write_text('{"text": "too short"}\n\n{"text": ""}\n{oops\n', "utf-8")
    (tmp_path / "recipe.py").write_text(
        "from torchtitan.data import Files, Loader\n"
        "from torchtitan_recipes.models.llama3 import llama3_debugmodel\n\n\n"
        "def short():\n"
        '    """Too short."""\n'
        "    config = llama3_debugmodel()\n"
        "    config.data = Loader.Config(sources=[Files.Config(path='data.jsonl')])\n"
        "    return config\n",
        "utf-8",
    )
    done = train(
        "--module=recipe.py", "--config=short", "--training.steps=2", f"--ngpu={n}", cwd=tmp_path
    )
    assert done.returncode == 3, done.stderr
    assert "data.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_configuration_is_exit_2_with_all_problems(tmp_path):
    done = train(
        "--training.stepz=3", "--optimizer.lr=-1", "--parallelism.dp-shard=3", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "training.stepz" in done.stderr
    assert "--training.steps" in done.stderr
    assert "optimizer.lr" in done.stderr
    assert "but the world size is 1" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_changed_setting_is_exit_4(tmp_path):
    assert train("--training.steps=1", "--folder=run", cwd=tmp_path).returncode == 0
    done = train("--training.steps=2", "--folder=run", "--optimizer.lr=0.5", cwd=tmp_path)
    assert done.returncode == 4
    assert "optimizer.lr: 0.003 -> 0.5" in done.stderr


def test_no_secret_reaches_the_screen_or_the_disk(tmp_path):
    secret = ["--metrics.wandb.init", "api_key", "s3cr3t-value"]
    for steps in (1, 2):
        done = train(f"--training.steps={steps}", "--folder=run", *secret, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "api_key" in done.stderr
        assert "s3cr3t" not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"api_key" in path.read_bytes() for path in files)
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


def test_numerics_is_exit_5(tmp_path):
    done = train(
        "--training.steps=20",
        "--folder=run",
        "--optimizer.lr=1e30",
        "--schedule.warmup-steps=0",
        cwd=tmp_path,
    )
    assert done.returncode == 5, done.stderr
    assert "No weight was changed" in done.stderr


def wait_for_step(folder, step, process):
    end = time.monotonic() + 240
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        if (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.parametrize("n", [1, 2])
def test_sigterm_saves_and_is_exit_7_and_the_run_goes_on(tmp_path, n):
    arguments = [
        "--training.steps=100000",
        "--folder=run",
        "--metrics.every-n-steps=1",
        f"--ngpu={n}",
    ]
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 7, error
    assert "run the same command again to go on" in error
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert max(losses(tmp_path / "run")) == step
    done = train(f"--training.steps={step + 2}", "--folder=run", f"--ngpu={n}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"at step {step}" in done.stderr


def test_sigkill_at_any_moment_leaves_a_run_that_goes_on_bit_for_bit(tmp_path):
    """Kills fall on steps, saves and prunes alike: every step is saved, one checkpoint is kept."""
    every = [
        "--checkpoint.every-n-steps=1",
        "--checkpoint.keep-latest=1",
        "--metrics.every-n-steps=1",
    ]
    straight = train("--training.steps=12", "--folder=straight", *every, cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    run = tmp_path / "run"
    for kill, step in enumerate((3, 6, 9)):
        process = subprocess.Popen(
            command("--training.steps=12", "--folder=run", *every),
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_step(run, step, process)
        time.sleep(0.013 * kill)
        process.kill()
        process.communicate()
    done = train("--training.steps=12", "--folder=run", *every, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    assert losses(run) == losses(tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_rank_that_ends_or_hangs_is_named_with_the_last_good_checkpoint(tmp_path, number):
    arguments = [
        "--training.steps=100000",
        "--folder=run",
        "--metrics.every-n-steps=1",
        "--checkpoint.every-n-steps=2",
        "--parallelism.timeout-s=5",
        "--checkpoint.timeout-s=5",
        "--ngpu=2",
    ]
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for_step(tmp_path / "run", 5, process)
    rank_1 = next(
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if variables_of(pid).get("LOCAL_RANK") == "1" and parent_of(pid) == process.pid
    )
    os.kill(rank_1, number)
    try:
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 6, error
    assert "rank 1 " in error
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-????????"))[-1]
    assert f"last good checkpoint: run/checkpoints/{saved.name}" in error


def variables_of(pid):
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in text.split("\0"))


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1
