"""What crosses to a worker that is not forked must survive being pickled."""

import itertools
import pickle

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.data.helpers import build
from torchtitan.data import Embedded, Files, HuggingFace, Loader
from torchtitan.data.worker import make_pieces


def test_a_plan_survives_pickling(tmp_path):
    texts = [f"Text number {i}." for i in range(100)]
    for name, content in (
        ("a.jsonl", '{"text": "a"}\n'),
        ("b.csv", "text\nb\n"),
        ("c.json", '[{"text": "c"}]'),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    sources = [
        Embedded.Config(),
        Files.Config(path=str(tmp_path), cache_folder=str(tmp_path / "cache")),
        HuggingFace.Config(name=str(tmp_path / "saved")),
        HuggingFace.Config(name=str(tmp_path / "saved"), streaming=True),
    ]
    plan = build(Loader.Config(sources=sources), rows=4).plan
    sent = pickle.loads(pickle.dumps(plan))
    for piece, other in itertools.islice(
        zip(make_pieces(plan), make_pieces(sent), strict=True), 10
    ):
        assert np.array_equal(piece.rows, other.rows)
        assert piece.states == other.states


def test_workers_share_the_streams_in_order():
    plan = build(Loader.Config(sources=[Embedded.Config()]), rows=8).plan
    whole = next(make_pieces(plan))
    shares = [next(make_pieces(plan, worker, 3)) for worker in range(3)]
    assert [list(share.states) for share in shares] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert np.array_equal(np.concatenate([share.rows for share in shares]), whole.rows)
