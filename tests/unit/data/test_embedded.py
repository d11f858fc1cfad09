import importlib
import sysconfig

import pytest

from tests.unit.data.helpers import build
from torchtitan.data import Embedded, Loader
from torchtitan.data.embedded import is_held_out
from torchtitan.errors import DataError


def test_the_splits_share_no_document_and_hold_text():
    train, validation = (Embedded.Config(split=split).build() for split in ("train", "validation"))
    assert set(train.names).isdisjoint(validation.names)
    assert train.names == sorted(train.names)
    assert 0.005 < len(validation) / (len(train) + len(validation)) < 0.05
    assert sum(len(train.read(i)) for i in range(100)) > 100_000
    assert all(validation.read(i) for i in range(len(validation)))
    assert not any("/test/" in name or "site-packages" in name for name in train.names)


def test_both_splits_fill_a_batch_of_the_debug_size():
    for split in ("train", "validation"):
        build(
            Loader.Config(sources=[Embedded.Config(split=split)], n_workers=0), rows=32, seq_len=256
        )


def test_the_split_is_a_hash_of_the_name():
    assert [name for name in (f"topic/{i}" for i in range(200)) if is_held_out(name)] == [
        "topic/19",
        "topic/163",
        "topic/180",
    ]


def test_an_installation_without_topics_or_without_sources(monkeypatch, tmp_path):
    whole = len(Embedded.Config().build())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    topics = Embedded.Config().build()
    assert 0 < len(topics) < whole
    assert topics.read(0)
    monkeypatch.undo()

    def no_topics(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", no_topics)
    sources = Embedded.Config().build()
    assert 0 < len(sources) < whole
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(
        DataError, match=r"Embedded\(split=train\): 0 documents: there is no text in it"
    ):
        build(Loader.Config(sources=[Embedded.Config()]))
