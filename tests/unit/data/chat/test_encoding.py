"""Encoding in several processes gives what one gives, in the same order, and its errors as they are."""

import json
import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch
from torch.utils.data import Dataset

from tests.unit.data.chat.test_loader import Rows
from tests.unit.data.helpers import TOKENIZER
from torchtitan.data import Files
from torchtitan.data.chat import encoding, prepared
from torchtitan.data.chat.encoding import encode_all
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.sample import DroppedRow, Sample
from torchtitan.data.chat.source import Chat
from torchtitan.data.processes import in_processes
from torchtitan.data.source import BadRow
from torchtitan.errors import DataError


@pytest.fixture(autouse=True)
def any_number_is_worthwhile(monkeypatch):
    monkeypatch.setattr(encoding, "_WORTHWHILE", 1)


def source(rows, **options):
    encoder = ChatLoader.Config(sources=[], **options).encoder(TOKENIZER, 64)
    return Chat.Config(rows=rows).open(encoder)


def told(items):
    return [
        (item.tokens.tolist(), item.learned.tolist())
        if isinstance(item, Sample)
        else (type(item), item.kind, str(item), item.fault)
        for item in items
    ]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_processes_change_nothing(workers):
    rows = Rows.Config(n=200)
    alone = told(encode_all(source(rows), 0))
    assert len(alone) == 200
    kinds = {kind for kind, *_ in alone if isinstance(kind, type)}
    assert kinds == {BadRow, DroppedRow}
    assert told(encode_all(source(rows), workers)) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_as_it_is_after_the_rows_before_it(workers, tmp_path):
    before = set(multiprocessing.active_children())
    rows = [
        json.dumps({"prompt": "q", "completion": "a" * (1 + 99 * (i == 150))}) for i in range(300)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    items = encode_all(
        source(Files.Config(path=str(tmp_path / "rows.jsonl")), too_long="error"), workers
    )
    assert len([next(items) for _ in range(150)]) == 150
    with pytest.raises(
        DataError, match=r"^\S*rows.jsonl line 151: it has \d+ tokens, more than"
    ) as error:
        next(items)
    assert "Traceback" not in str(error.value)
    left = set(multiprocessing.active_children()) - before
    assert not left  # though the error's traceback holds their iterator


def test_the_lock_is_free_while_processes_still_end(tmp_path):
    """Forked processes share it: closing it in the parent is not enough."""
    loader = ChatLoader.Config(sources=[Chat.Config(rows=Rows.Config(n=200))], cache_folder=str(tmp_path), max_bad_fraction=0.5)  # fmt: skip
    loaders = [
        loader.build(tokenizer=TOKENIZER, seq_len=64, global_batch_rows=4, dp_rank=0, dp_world_size=1, seed=0)
        for _ in range(2)
    ]  # fmt: skip
    assert loaders[0].packed_rows == loaders[1].packed_rows


def be_killed_while_writing(home):
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    prepared.np.save = killed
    loader = ChatLoader.Config(sources=[Chat.Config(rows=Rows.Config(n=61))], n_workers=0, cache_folder=home, max_bad_fraction=0.5)  # fmt: skip
    loader.build(
        tokenizer=TOKENIZER, seq_len=64, global_batch_rows=4, dp_rank=0, dp_world_size=1, seed=0
    )


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=be_killed_while_writing, args=(str(tmp_path),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    loader = ChatLoader.Config(sources=[Chat.Config(rows=Rows.Config(n=61))], n_workers=0, cache_folder=str(tmp_path), max_bad_fraction=0.5)  # fmt: skip
    loader.build(
        tokenizer=TOKENIZER, seq_len=64, global_batch_rows=4, dp_rank=0, dp_world_size=1, seed=0
    )
    assert list(tmp_path.glob("*.tmp")) == []


def test_what_is_sent_to_a_process_that_is_not_forked_gives_the_same():
    pieces = encoding._Pieces(source(Rows.Config(n=64)))
    sent = pickle.loads(pickle.dumps(pieces))
    assert told(pickle.loads(pickle.dumps(sent[0]))) == told(pieces[0])


def test_a_process_that_dies_is_a_data_error(tmp_path, monkeypatch):
    def die(*_):
        time.sleep(
            0.2
        )  # torch cannot bear it while it still fills the queues: a lock may be left taken
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(encoding._Pieces, "__getitem__", die)
    loader = ChatLoader.Config(sources=[Chat.Config(rows=Rows.Config(n=200))], cache_folder=str(tmp_path))  # fmt: skip
    with pytest.raises(DataError, match=r"a data worker died .*; if memory ran out, set data.n_workers=0"):  # fmt: skip
        loader.build(tokenizer=TOKENIZER, seq_len=64, global_batch_rows=4, dp_rank=0, dp_world_size=1, seed=0)  # fmt: skip
    assert list(tmp_path.glob("*.tmp")) == []


class Large(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return bytes(
            1 << 20
        )  # more than a pipe holds: the process that sends it waits for a reader


def be_killed_while_processes_wait(pids):
    items = in_processes(Large(), 2, prefetch=4)
    next(items)
    for process in torch.multiprocessing.active_children():
        pids.send(process.pid)
    time.sleep(0.5)  # now they wait
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_end_with_their_parent():
    """They may hold its lock; torch's own watch does not end those that wait for a reader."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=be_killed_while_processes_wait, args=(theirs,)
    )
    process.start()
    pids = [mine.recv(), mine.recv()]
    process.join(60)
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "they wait for ever"
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
