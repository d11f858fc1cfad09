"""Saving, choosing and loading in one process, without torch.distributed."""

import dataclasses
import errno
import os
import resource
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from torchtitan.checkpoint import Checkpointer
from torchtitan.errors import CheckpointError


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    """Recognisable tensors of several dtypes: a matrix, a scalar, a bf16 view of a larger storage."""
    return {
        "policy.model.weight": torch.full((300, 100), float(step)),
        "policy.optimizer.weight.step": torch.tensor(float(step)),
        "policy.model.view": torch.arange(20, dtype=torch.bfloat16).add(step)[5:9],
    }


def make_rng(step: int) -> dict[str, torch.Tensor]:
    return {"rng.cpu": torch.full((64,), step % 256, dtype=torch.uint8)}


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, make_tensors(step), make_rng(step), {"step": step, "seen": [1, 2]})


def assert_holds(checkpointer: Checkpointer, path, step: int) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(0).items()}
    rng = make_rng(0)
    checkpointer.load(path, tensors, rng)
    for name, expected in (make_tensors(step) | make_rng(step)).items():
        assert torch.equal((tensors | rng)[name], expected), name
    assert checkpointer.read_state(path) == {"step": step, "seen": [1, 2]}


def names(run_folder) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


@pytest.fixture
def build(tmp_path):
    """Make a checkpointer of one and the same run folder; all are closed at the end."""
    made = []

    def make(**fields) -> Checkpointer:
        made.append(Checkpointer.Config(**fields).build(folder=tmp_path))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_saved_is_loaded(build, async_save):
    checkpointer = build(async_save=async_save)
    save(checkpointer, 10)
    path = checkpointer.resolve("latest")
    assert path.name == "step-00000010"
    assert_holds(checkpointer, path, 10)
    assert_holds(build(), path, 10)


def test_without_a_checkpoint_a_run_starts_from_the_beginning(build):
    assert build().latest() is None
    assert build().resolve("latest") is None


def test_never_ignores_what_is_there(build):
    save(build(), 10)
    assert build().resolve("never") is None


def test_a_path_is_taken_from_any_folder(build, tmp_path):
    save(build(), 10)
    elsewhere = shutil.move(tmp_path / "checkpoints" / "step-00000010", tmp_path / "copy")
    checkpointer = build()
    assert_holds(checkpointer, checkpointer.resolve(str(elsewhere)), 10)
    assert checkpointer.latest() is None


def test_a_path_that_is_no_checkpoint_is_refused_with_what_there_is(build, tmp_path):
    save(build(), 10)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint folder .*/nowhere"):
        build().resolve(str(tmp_path / "nowhere"))
    with pytest.raises(
        CheckpointError, match=r"no manifest.json; it holds .*step-00000010: pass one"
    ):
        build().resolve(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no manifest.json; pass a complete one"):
        build().resolve(str(tmp_path / "empty"))


def test_due_every_n_steps():
    config = Checkpointer.Config(every_n_steps=3)
    assert [step for step in range(1, 8) if Checkpointer.due(_Only(config), step)] == [3, 6]
    assert not Checkpointer.due(_Only(Checkpointer.Config(every_n_steps=0)), 3)


class _Only:
    def __init__(self, config):
        self.config = config


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"every_n_steps": -1},
            "every_n_steps=-1: is negative; set a number of steps, or 0 for none",
        ),
        ({"keep_every_n_steps": -2}, "keep_every_n_steps=-2: is negative; set"),
        ({"keep_latest": 0}, "keep_latest=0: would keep no checkpoint; set 1 or more"),
        (
            {"resume": "lastest"},
            "resume=lastest: is no complete checkpoint: it has no manifest.json; set",
        ),
    ],
)
def test_config_problems(fields, problem):
    (found,) = Checkpointer.Config(**fields).check()
    assert str(found).startswith(problem)


def test_good_configs_have_no_problems(build, tmp_path):
    save(build(), 10)
    resume = str(tmp_path / "checkpoints" / "step-00000010")
    for config in (Checkpointer.Config(), Checkpointer.Config(resume=resume, keep_latest=1)):
        assert list(config.check()) == []


def test_every_field_is_operational():
    fields = {field.name for field in dataclasses.fields(Checkpointer.Config)}
    assert fields == Checkpointer.Config.OPERATIONAL


@pytest.mark.parametrize("keep_latest", [1, 2])
def test_only_the_newest_are_kept(build, tmp_path, keep_latest):
    checkpointer = build(keep_latest=keep_latest)
    for step in (1, 2, 3, 100_000_000):
        save(checkpointer, step)
    expected = ["step-00000002", "step-00000003", "step-100000000"][-keep_latest:]
    assert names(tmp_path) == expected
    assert_holds(checkpointer, checkpointer.resolve("latest"), 100_000_000)


def test_exempt_steps_are_never_deleted(build, tmp_path):
    checkpointer = build(keep_latest=1, keep_every_n_steps=4)
    for step in (2, 4, 6, 8, 10):
        save(checkpointer, step)
    assert names(tmp_path) == ["step-00000004", "step-00000008", "step-00000010"]


def test_an_old_checkpoint_that_cannot_be_deleted_stops_nothing(build, monkeypatch, caplog):
    checkpointer = build(keep_latest=1)
    save(checkpointer, 1)

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(checkpointer, 2)
    assert "step-00000001 could not be deleted" in caplog.text
    assert checkpointer.latest().name == "step-00000002"


def test_the_step_decides_not_the_time_stamp(build, tmp_path):
    checkpointer = build()
    save(checkpointer, 10)
    save(checkpointer, 20)
    os.utime(tmp_path / "checkpoints" / "step-00000010", (2e9, 2e9))
    os.utime(tmp_path / "checkpoints" / "step-00000010" / "manifest.json", (2e9, 2e9))
    assert checkpointer.latest().name == "step-00000020"
    save(checkpointer, 5)  # by the same run: not newer, and not deleted for being just written
    assert checkpointer.latest().name == "step-00000020"
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000020"]


def test_a_step_saved_again_replaces_the_old_one(build, tmp_path):
    save(build(), 10)
    checkpointer = build()
    checkpointer.save(10, make_tensors(11), make_rng(11), {"step": 11, "seen": [1, 2]})
    assert names(tmp_path) == ["step-00000010"]
    assert_holds(checkpointer, checkpointer.latest(), 11)


def test_a_failed_replacement_puts_the_old_one_back(build, tmp_path, monkeypatch):
    save(build(), 10)
    checkpointer = build()
    rename = os.rename

    def fail_to_commit(source, target):
        if source.parent == tmp_path / "checkpoints" and ".tmp-" in source.name:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_to_commit)
        with pytest.raises(CheckpointError, match=r"step 10: .*Input/output error"):
            checkpointer.save(10, make_tensors(11), make_rng(11), {})
    assert names(tmp_path) == ["step-00000010"]
    assert_holds(checkpointer, checkpointer.resolve("latest"), 10)


def test_a_run_from_an_earlier_step_sets_newer_ones_aside(build, tmp_path, caplog):
    first = build(keep_latest=3)
    for step in (10, 20, 30):
        save(first, step)
    second = build(keep_latest=1)
    second.resolve(str(tmp_path / "checkpoints" / "step-00000010"))
    save(second, 15)
    assert names(tmp_path) == [
        "step-00000015",
        "step-00000020.superseded",
        "step-00000030.superseded",
    ]
    assert "newer than this run, which is at step 15" in caplog.text
    assert second.latest().name == "step-00000015"


def test_leftovers_are_swept_at_the_start_and_never_chosen(build, tmp_path):
    save(build(), 10)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000010", folder / "step-00000020.tmp-0123abcd")
    (folder / "step-00000030").mkdir()  # no manifest
    assert build().latest().name == "step-00000010"
    assert names(tmp_path) == ["step-00000010", "step-00000030"]


def test_async_save_is_isolated_from_later_changes(build, monkeypatch):
    checkpointer = build(async_save=True)
    changed = threading.Event()
    begin = checkpointer.folder.begin
    monkeypatch.setattr(
        checkpointer.folder, "begin", lambda *args: changed.wait(30) and begin(*args)
    )
    tensors, rng, state = make_tensors(10), make_rng(10), {"step": 10, "seen": [1, 2]}
    checkpointer.save(10, tensors, rng, state)
    for tensor in [*tensors.values(), *rng.values()]:
        tensor.zero_()
    state["seen"].append(3)
    changed.set()
    assert_holds(checkpointer, checkpointer.resolve("latest"), 10)


def test_async_failure_surfaces_at_the_next_call_and_the_next_save_works(
    build, monkeypatch, tmp_path
):
    checkpointer = build(async_save=True)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", "manifest.json")

    for surface in (
        checkpointer.wait,
        lambda: save(checkpointer, 20),
        lambda: checkpointer.resolve("latest"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer.folder, "commit", full)
            save(checkpointer, 10)
            with pytest.raises(
                CheckpointError, match=r"^checkpoint of step 10: .*No space left on device"
            ):
                surface()
    assert names(tmp_path) == []
    save(checkpointer, 30)
    assert_holds(checkpointer, checkpointer.resolve("latest"), 30)


def test_a_full_disk_keeps_the_old_one_and_is_named(build, tmp_path):
    checkpointer = build(keep_latest=1)
    save(checkpointer, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (50_000, hard)
    )  # a write beyond fails with an OSError
    try:
        with pytest.raises(
            CheckpointError, match=r"^checkpoint of step 20: .*File too large: .*__0_0.distcp"
        ):
            save(checkpointer, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000010"]
    assert_holds(checkpointer, checkpointer.resolve("latest"), 10)


def test_too_little_space_is_seen_before_writing(build, tmp_path, monkeypatch):
    checkpointer = build()
    usage = shutil.disk_usage(tmp_path)._replace(free=2**10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        CheckpointError, match=r"step 10: it needs 0.00 GiB, but .* has 0.00 GiB free; free some"
    ):
        save(checkpointer, 10)
    assert names(tmp_path) == []


def test_an_unwritable_folder_is_reported_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"file/run/checkpoints is not writable: .*Not a directory"
    ):
        Checkpointer.Config().build(folder=tmp_path / "file" / "run")


def test_state_that_is_not_json_is_refused(build, tmp_path):
    with pytest.raises(CheckpointError, match=r"step 10: TypeError.*set is not JSON serializable"):
        build().save(10, make_tensors(10), {}, {"ids": {1, 2}})
    assert names(tmp_path) == []


def test_all_tensors_that_do_not_fit_are_listed_and_nothing_is_changed(build):
    checkpointer = build()
    save(checkpointer, 10)
    tensors = {
        "policy.model.wieght": torch.zeros(300, 100),
        "policy.model.view": torch.zeros(5, dtype=torch.bfloat16),
        "policy.optimizer.weight.step": torch.zeros((), dtype=torch.float64),
    }
    with pytest.raises(CheckpointError) as error:
        checkpointer.load(checkpointer.latest(), tensors, make_rng(0))
    assert str(error.value).splitlines()[1:] == [
        "  missing from the checkpoint: policy.model.wieght (float32 [300, 100]); "
        "the checkpoint has policy.model.weight",
        "  not in this run: policy.model.weight (float32 [300, 100])",
        "  wrong shape: policy.model.view is bfloat16 [4], this run has bfloat16 [5]",
        "  wrong dtype: policy.optimizer.weight.step is float32 [], this run has float64 []",
    ]
    assert "4 of its tensors do not fit this run; resume with the config" in str(error.value)
    assert not any(tensor.any() for tensor in tensors.values())


def test_rank_tensors_that_were_not_saved_keep_their_values(build, caplog):
    checkpointer = build()
    save(checkpointer, 10)
    rng = make_rng(0) | {"rng.cuda": torch.full((16,), 7, dtype=torch.uint8)}
    checkpointer.load(checkpointer.latest(), make_tensors(0), rng)
    assert rng["rng.cpu"].eq(10).all()
    assert rng["rng.cuda"].eq(7).all()
    assert caplog.text.count("no random state for some ranks or devices") == 1


def test_importing_the_package_does_not_import_dcp():
    code = (
        "import sys, torchtitan.checkpoint; "
        "sys.exit(any(n in sys.modules for n in ('torch.distributed.checkpoint', 'torch.distributed.tensor')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
