import os
import threading
from pathlib import Path

import pytest

from torchtitan.data.cache import cached_copy
from torchtitan.errors import DataError


def copy_of(path: Path, folder: Path, write, variant: str = "") -> Path:
    return cached_copy(path, suffix=".txt", variant=variant, folder=str(folder), write=write)


def test_a_copy_is_made_once_and_again_when_the_file_changes(tmp_path):
    path = tmp_path / "a.gz"
    path.write_text("one", encoding="utf-8")
    made = []

    def write(copy: Path) -> None:
        made.append(copy)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")

    first = copy_of(path, tmp_path / "cache", write)
    assert copy_of(path, tmp_path / "cache", write) == first
    assert len(made) == 1
    assert copy_of(path, tmp_path / "cache", write, variant="other") != first
    path.write_text("another", encoding="utf-8")
    second = copy_of(path, tmp_path / "cache", write)
    assert second.read_text(encoding="utf-8") == "another"
    assert first.read_text(encoding="utf-8") == "one"


def test_several_at_once_write_one_copy(tmp_path):
    path = tmp_path / "a.gz"
    path.write_text("text", encoding="utf-8")
    made = []
    entered = threading.Event()

    def write(copy: Path) -> None:
        made.append(copy)
        entered.wait(0.2)
        copy.write_text("text", encoding="utf-8")

    threads = [
        threading.Thread(target=copy_of, args=(path, tmp_path / "cache", write)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_copy_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "a.gz"
    path.write_text("text", encoding="utf-8")

    def write(copy: Path) -> None:
        copy.write_text("half", encoding="utf-8")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        DataError,
        match=r"a.gz: cannot make its plain copy in .*cache \(.*No space left.*; free some space",
    ):
        copy_of(path, tmp_path / "cache", write)
    assert [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")] == []
