"""Files that are not what was written are found before a single tensor is changed."""

import dataclasses
import hashlib
import os
import pickle
import re

import pytest
import torch

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.files import FileRecord
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.errors import CheckpointError

ALL_FILES = ["__0_0.distcp", ".metadata", "state.json", "manifest.json"]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{index}.weight": torch.full((50, 50), value) for index in range(5)}


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = Checkpointer.Config().build(folder=tmp_path)
    for step in (10, 20):
        checkpointer.save(step, tensors(step), {}, {"step": step})
    yield checkpointer
    checkpointer.close()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


FOUND = {
    truncate: "has .* bytes instead of",
    flip_one_bit: "has sha256 .* instead of",
    remove: "is missing",
}


@pytest.mark.parametrize("damage", [truncate, flip_one_bit, remove])
@pytest.mark.parametrize("file", ALL_FILES)
def test_latest_falls_back_to_the_one_before(checkpointer, tmp_path, caplog, damage, file):
    newest = checkpointer.latest()
    damage(newest / file)
    if file == "manifest.json":
        expected = None if damage is remove else "manifest.json is damaged"
    else:
        expected = f"{file} {FOUND[damage]}"

    path = checkpointer.resolve("latest")

    loaded = tensors(0)
    checkpointer.load(path, loaded, {})
    assert checkpointer.read_state(path) == {"step": 10}
    assert all(tensor.eq(10).all() for tensor in loaded.values())
    if expected is not None:  # a folder without a manifest is not a checkpoint at all
        assert (tmp_path / "checkpoints" / "step-00000020.corrupt").is_dir()
        (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert re.search(expected, record.getMessage())


@pytest.mark.parametrize("damage", [truncate, flip_one_bit, remove])
@pytest.mark.parametrize("file", ALL_FILES)
def test_a_damaged_checkpoint_that_was_named_is_an_error(checkpointer, damage, file):
    path = checkpointer.latest()
    damage(path / file)
    with pytest.raises(CheckpointError, match=file):
        checkpointer.resolve(str(path))
    before = tensors(0)
    with pytest.raises(CheckpointError, match=file):
        checkpointer.load(path, before, {})
    assert not any(tensor.any() for tensor in before.values())
    assert path.is_dir()


def test_the_tensors_in_a_damaged_file_are_named(checkpointer):
    path = checkpointer.latest()
    flip_one_bit(path / "__0_0.distcp")
    with pytest.raises(
        CheckpointError,
        match=r"\(it holds layers.0.weight, layers.1.weight, .* and 2 more\); restore",
    ):
        checkpointer.resolve(str(path))


def test_when_none_is_left_it_is_an_error_now_and_at_the_next_start(checkpointer, tmp_path):
    for path in checkpointer.folder.complete():
        truncate(path / "state.json")
    text = r"no usable checkpoint is left in .*: step-00000010.corrupt, step-00000020.corrupt; restore one"
    with pytest.raises(CheckpointError, match=text):
        checkpointer.resolve("latest")
    with pytest.raises(CheckpointError, match=text):
        Checkpointer.Config().build(folder=tmp_path).resolve("latest")


def test_a_second_damaged_checkpoint_of_a_step_gets_its_own_name(checkpointer, tmp_path):
    flip_one_bit(checkpointer.latest() / "state.json")
    checkpointer.resolve("latest")
    checkpointer.save(20, tensors(20), {}, {"step": 20})
    flip_one_bit(checkpointer.latest() / "state.json")
    assert checkpointer.resolve("latest").name == "step-00000010"
    assert len(list((tmp_path / "checkpoints").glob("step-00000020.corrupt*"))) == 2


def test_damaged_state_is_never_returned(checkpointer):
    flip_one_bit(checkpointer.latest() / "state.json")
    with pytest.raises(CheckpointError, match=r"step-00000020: state.json has sha256"):
        checkpointer.read_state(checkpointer.latest())


def test_without_hashes_sizes_are_still_compared(checkpointer, tmp_path):
    quick = Checkpointer.Config(verify_hashes=False).build(folder=tmp_path)
    flip_one_bit(checkpointer.latest() / "__0_0.distcp")
    assert quick.resolve("latest").name == "step-00000020"
    truncate(checkpointer.latest() / "__0_0.distcp")
    assert quick.resolve("latest").name == "step-00000010"


def test_a_newer_format_is_refused_not_called_damaged(checkpointer, monkeypatch):
    monkeypatch.setattr("torchtitan.checkpoint.manifest.FORMAT", 2)
    checkpointer.save(30, tensors(30), {}, {"step": 30})
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match="has a format other than 1: a newer torchtitan wrote it"
    ):
        checkpointer.resolve("latest")
    assert checkpointer.latest().name == "step-00000030"


class Payload:
    """A pickle of this runs a shell command when it is loaded."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def forge(path, file, content: bytes):
    """Put ``content`` into a file, and its size and hash into the manifest, as an attacker would."""
    (path / file).write_bytes(content)
    manifest = read_manifest(path)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    (path / "manifest.json").unlink()
    dataclasses.replace(manifest, files=manifest.files | {file: record}).write(path)


def test_a_malicious_pickle_is_refused_and_not_run(checkpointer, tmp_path):
    path = checkpointer.latest()
    forge(path, ".metadata", pickle.dumps(Payload(f"touch {tmp_path / 'ran'}")))
    assert checkpointer.resolve("latest") == path
    with pytest.raises(
        CheckpointError,
        match=r"/\.metadata is refused: its pickle asks for posix.system, .* nothing",
    ):
        checkpointer.load(path, tensors(0), {})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "asks for builtins.eval"),
        (
            b"\x80\x04\x8c\x13torch.serialization\x8c\x17_get_layout.__globals__\x93.",
            "asks for torch.serialization._get_layout.__globals__",
        ),
        (b"\x80\x04\x8c\x05torch\x8c\x02os\x93.", "asks for torch.os"),
        (b"\x80\x04\x8c\x05torch\x8c\x07float32\x93.", "holds a dtype, not the metadata"),
        (b"not a pickle", "cannot be read: "),
    ],
)
def test_other_bad_pickles_are_refused(checkpointer, content, text):
    path = checkpointer.latest()
    forge(path, ".metadata", content)
    with pytest.raises(CheckpointError, match=rf"\.metadata .*{text}"):
        checkpointer.load(path, tensors(0), {})


def test_metadata_that_points_outside_its_folder_is_refused(checkpointer):
    path = checkpointer.latest()
    content = (path / ".metadata").read_bytes()
    assert content.count(b"__0_0.distcp") == 1
    forge(path, ".metadata", content.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(
        CheckpointError, match=r"\.metadata is refused: it points outside .*, to ../../secret"
    ):
        checkpointer.load(path, tensors(0), {})


def test_a_malicious_shard_is_refused_and_not_run(checkpointer, tmp_path):
    path = checkpointer.latest()
    size = (path / "__0_0.distcp").stat().st_size
    payload = pickle.dumps(Payload(f"touch {tmp_path / 'ran'}"), protocol=2)
    forge(path, "__0_0.distcp", payload.ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=r"loading .*step-00000020"):
        checkpointer.load(path, tensors(0), {})
    assert not (tmp_path / "ran").exists()
