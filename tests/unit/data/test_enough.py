"""Too little data ends in one sentence with counts, the same on every rank, before the first step."""

import json

import pytest

from tests.unit.data.helpers import TOKENIZER, StreamedTexts, Texts, build
from torchtitan.data import Files, Loader
from torchtitan.errors import DataError

TEXT = "Some words of text."
TOKENS = len(TOKENIZER.encode(TEXT)) + 2


def loader(*sources, **fields) -> Loader.Config:
    return Loader.Config(sources=list(sources), **fields)


@pytest.mark.parametrize("kind", [Texts, StreamedTexts])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1), (4, 2)])
def test_less_than_one_global_batch(kind, ranks, workers):
    config = loader(kind.Config(texts=[TEXT] * 5 + [""]), n_workers=workers)
    errors = set()
    for rank in range(ranks):
        with pytest.raises(DataError) as caught:
            build(config, rank=rank, ranks=ranks)
        errors.add(str(caught.value))
    (error,) = errors
    assert error.startswith("too little data: ")
    assert (
        f"(6 rows read: 5 documents, 1 empty, 0 bad (none)) give {5 * TOKENS} tokens, which pack into "
        f"{5 * TOKENS // 32} rows of seq_len=32, but one global batch needs global_batch_rows=8 rows (256 tokens); "
        "set fewer global_batch_rows or a shorter seq_len, or add data"
    ) in error


def test_just_enough_is_enough():
    rows = 5 * TOKENS // 2
    build(loader(Texts.Config(texts=[TEXT] * 5), n_workers=0), rows=rows, seq_len=2).next()
    with pytest.raises(DataError, match="too little data"):
        build(loader(Texts.Config(texts=[TEXT] * 5), n_workers=0), rows=rows + 1, seq_len=2)


@pytest.mark.parametrize("kind", [Texts, StreamedTexts])
@pytest.mark.parametrize("texts", [[], ["", " \n"]])
def test_a_source_without_text(kind, texts):
    plenty = Texts.Config(texts=[TEXT] * 1000)
    with pytest.raises(
        DataError,
        match=rf"there is no text in it \({len(texts)} rows read: 0 documents, .*; point the",
    ):
        build(loader(plenty, kind.Config(texts=texts)))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_empty_files(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"a\.\w+\): 1 files, [01] rows: there is no text in it"):
        build(loader(Files.Config(path=str(tmp_path / name))))


@pytest.mark.parametrize("n_rows", [3, 500])
def test_all_rows_are_bad(tmp_path, n_rows):
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"body": "x"}) + "\n" + '{"text": null}\n' * (n_rows - 1), encoding="utf-8"
    )
    expected = (
        r"0 documents, 0 empty, 3 bad \(missing_field 1, null 2\)"
        if n_rows == 3
        else "10 of 10 rows read are bad"
    )
    with pytest.raises(DataError, match=expected):
        build(loader(Files.Config(path=str(path))))


def test_all_rows_are_bad_and_the_policy_is_to_stop(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n', encoding="utf-8")
    with pytest.raises(
        DataError, match=r"^bad row: .*a.jsonl line 1: the text is null; mend the row"
    ):
        build(loader(Files.Config(path=str(path)), bad_rows="error"))


def test_two_sources_together_fill_the_batch():
    one, other = (Texts.Config(texts=[TEXT] * 20) for _ in range(2))
    rows = 30 * TOKENS // 2
    build(loader(one, other, n_workers=0), rows=rows, seq_len=2)
    with pytest.raises(DataError, match="too little data: Texts: 20 rows "):
        build(loader(one, n_workers=0), rows=rows, seq_len=2)


def test_a_large_source_is_judged_by_a_sample():
    class Counting(Texts):
        reads = 0

        def read(self, index: int) -> str:
            Counting.reads += 1
            return TEXT

        def __len__(self) -> int:
            return 10**9

    class Config(Texts.Config):
        def build(self) -> Counting:
            return Counting(self)

    build(loader(Config(), n_workers=0), rows=100_000, seq_len=64)
    assert Counting.reads == 1000
