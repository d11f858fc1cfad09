import json

import datasets
import pytest

from tests.unit.data.helpers import Ranks, same
from torchtitan.data import HuggingFace, Loader
from torchtitan.data.order import permuted, shuffled
from torchtitan.data.source import BadRow
from torchtitan.errors import DataError

TEXTS = [f"Text number {i} of the data set. " * (1 + i % 3) for i in range(60)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("saved")
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    dataset.save_to_disk(folder, num_shards=3)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder that `load_dataset` opens by name; three shards, so that a careless reader would split them."""
    path = tmp_path_factory.mktemp("folder")
    for shard in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[shard * 20 : shard * 20 + 20]]
        (path / f"{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_saved_data_set(saved):
    source = HuggingFace.Config(name=saved).build()
    assert [source.read(i) for i in range(len(source))] == TEXTS
    assert source.describe() == f"HuggingFace({saved}, split=train): 60 rows"


def test_a_saved_data_set_with_splits(tmp_path):
    dataset = datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"text": ["a", None]})})
    dataset.save_to_disk(tmp_path)
    source = HuggingFace.Config(name=str(tmp_path), split="dev").build()
    assert source.read(0) == "a"
    with pytest.raises(BadRow, match=r"null"):
        source.read(1)
    with pytest.raises(
        DataError, match=r"cannot open the data set \(split=train, subset=None\): KeyError"
    ):
        HuggingFace.Config(name=str(tmp_path)).build()


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("start", [1, 20, 59])
def test_a_stream_goes_on_where_it_was(folder, shuffle_seed, start):
    source = HuggingFace.Config(name=folder, streaming=True).build()
    whole = list(source.rows(start=0, shuffle_seed=shuffle_seed))
    assert sorted(whole) == sorted(TEXTS)
    assert (whole == TEXTS) == (shuffle_seed is None)
    assert list(source.rows(start=start, shuffle_seed=shuffle_seed)) == whole[start:]


def test_the_order_of_a_shuffled_stream_is_not_the_librarys(folder):
    """It changes from version to version, and a run is resumed by the number of rows that it has read."""
    source = HuggingFace.Config(name=folder, streaming=True).build()
    shards = [TEXTS[20 * s : 20 * s + 20] for s in (permuted(i, 3, 7) for i in range(3))]
    expected = list(shuffled([text for shard in shards for text in shard], 10_000, 7))
    assert list(source.rows(start=0, shuffle_seed=7)) == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_workers_and_resumes(folder, streaming, shuffle):
    source = HuggingFace.Config(name=folder, streaming=streaming)

    def loaders(workers: int) -> Loader.Config:
        return Loader.Config(sources=[source], n_workers=workers, shuffle=shuffle)

    straight = Ranks(loaders(0), rows=4).take(18)
    first = Ranks(loaders(2), ranks=2, rows=4)
    taken = first.take(8)
    first.close()
    second = Ranks(loaders(1), ranks=1, rows=4, state=first.state)
    taken += second.take(10)
    second.close()
    assert same(taken, straight)
    assert sum(sum(stream["taken"]) for stream in second.state["streams"].values()) > len(TEXTS)


def test_a_streamed_null_is_a_bad_row_with_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n', encoding="utf-8")
    source = HuggingFace.Config(name=str(tmp_path), streaming=True).build()
    assert list(source.rows(start=0, shuffle_seed=None)) == ["a", None]
    assert source.place(1) == f"{tmp_path}, split=train row 2 as streamed"


def test_a_stream_that_breaks_is_a_data_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3, encoding="utf-8")
    source = HuggingFace.Config(name=str(tmp_path), streaming=True).build()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"reading the stream failed \(FileNotFoundError: .*; run again to resume"
    ):
        list(source.rows(start=0, shuffle_seed=None))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_is_missing(folder, streaming):
    expected = r"no column 'body'; it has text: set text_field to one of them"
    with pytest.raises(DataError, match=expected):
        HuggingFace.Config(name=folder, text_field="body", streaming=streaming).build()


def test_a_split_that_is_missing(folder):
    expected = r"cannot open the data set \(split=dev, subset=None\): ValueError: Unknown split .*check the name"
    with pytest.raises(DataError, match=expected):
        HuggingFace.Config(name=folder, split="dev").build()


def test_check(folder):
    assert not list(HuggingFace.Config(name=folder).check())
    (problem,) = HuggingFace.Config(name="./nowhere").check()
    assert (
        str(problem)
        == "name=./nowhere: does not exist; name a folder that does, or a data set such as org/name"
    )
    (problem,) = HuggingFace.Config(name=folder, split="train[:5]", streaming=True).check()
    assert (
        str(problem)
        == "split=train[:5]: a streamed split has no slices; name the whole split, or set streaming=false"
    )
