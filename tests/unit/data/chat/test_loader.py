"""Batches of conversations: the same for any number of ranks and workers, and exact on resume."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.unit.data.helpers import TOKENIZER, Ranks, build, same
from torchtitan.batch import IGNORE_INDEX
from torchtitan.config import check_tree, from_dict, to_dict
from torchtitan.data import Files, HuggingFace, MapSource, SequentialSource, Source
from torchtitan.data.chat import prepared
from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat
from torchtitan.data.order import permuted
from torchtitan.errors import ConfigError, DataError

N_STEPS = 14


def row(i: int) -> dict:
    if i % 11 == 5:
        return {"instruction": "nothing", "output": None}  # a bad row
    if i % 13 == 7:
        return {"instruction": "long", "output": "word " * 200}  # longer than a row
    return {"instruction": f"q {i}", "output": f"answer {i} " + "and on " * (i % 6)}


class Rows(MapSource):
    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        n: int = 61

        def build_rows(self) -> "Rows":
            return Rows(self)

    def __init__(self, config: Config) -> None:
        self.n = config.n

    def __len__(self) -> int:
        return self.n

    def read(self, index: int) -> dict:
        return row(index)

    def describe(self) -> str:
        return f"Rows({self.n})"


class StreamedRows(SequentialSource):
    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        n: int = 61
        streaming: bool = True

        def build_rows(self) -> "StreamedRows":
            return StreamedRows(self)

    def __init__(self, config: Config) -> None:
        self.n = config.n

    def rows(self, *, start: int, shuffle_seed: int | None) -> Iterator[object]:
        for i in range(start, self.n):
            yield row(i if shuffle_seed is None else permuted(i, self.n, shuffle_seed))

    def place(self, row: int) -> str:
        return f"row {row + 1}"

    def describe(self) -> str:
        return "StreamedRows"


KINDS = {
    "best_fit": (Rows, "best_fit"),
    "streaming": (Rows, "streaming"),
    "streamed": (StreamedRows, "streaming"),
    "none": (Rows, "none"),
    "streamed_none": (StreamedRows, "none"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "DEFAULT_FOLDER", str(tmp_path / "cache"))


def config(kind: str = "streaming", **fields) -> ChatLoader.Config:
    source, packing = KINDS[kind]
    options = {"n_workers": 0, "look_ahead": 5, "max_bad_fraction": 0.5, "packing": packing}
    return ChatLoader.Config(sources=[Chat.Config(rows=source.Config())], **{**options, **fields})


def take(kind: str, n_steps: int = N_STEPS, **fields) -> tuple[list[torch.Tensor], dict]:
    run = Ranks(config(kind, **fields), rows=4, seq_len=64)
    batches = run.take(n_steps)
    run.close()
    return batches, run.state


def samples(batches: list[torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and labels of each document."""
    for batch in batches:
        for tokens, labels, positions, ids in batch:
            for number in ids.unique():
                here = ids == number
                assert positions[here].tolist() == list(range(int(here.sum())))
                yield tokens[here].tolist(), labels[here].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (4, 1)])
def test_the_global_batch_does_not_depend_on_ranks_or_workers(kind, ranks, workers):
    batches, state = take(kind)
    run = Ranks(config(kind, n_workers=workers), ranks=ranks, rows=4, seq_len=64)
    assert same(run.take(N_STEPS), batches)
    assert run.state["streams"] == state["streams"]
    run.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1)])
def test_resuming_goes_on_exactly_over_the_epoch_edge_and_twice(kind, ranks, workers):
    batches, state = take(kind)
    epoch = build(config(kind), rows=4, seq_len=64).packed_rows or 61
    assert sum(sum(s["taken"]) for s in state["streams"].values()) > epoch
    taken, at = [], None
    for n_ranks, n_workers, n_steps in ((ranks, workers, 3), (4 // ranks, 0, 6), (1, workers, 5)):
        run = Ranks(config(kind, n_workers=n_workers), ranks=n_ranks, rows=4, seq_len=64, state=at)
        taken += run.take(n_steps)
        at = json.loads(json.dumps(run.state))
        run.close()
    assert same(taken, batches)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_whole_samples_and_the_rest_is_a_document_without_labels(kind):
    batches, state = take(kind)
    whole = padding = 0
    for tokens, labels in samples(batches):
        learned = [label for label in labels if label != IGNORE_INDEX]
        if not learned:
            assert set(tokens) == {TOKENIZER.eos_id}
            padding += len(tokens)
            continue
        whole += 1
        text = TOKENIZER.decode(tokens)
        assert text.startswith("<|im_start|>user\nq ")
        assert text.endswith("<|im_end|>\n")
        assert TOKENIZER.decode(learned).startswith("answer ")
        assert learned[-1] == TOKENIZER.vocab["<|im_end|>"]
    assert whole > N_STEPS * 4 - 1
    filled = sum(stream["filled"] for stream in state["streams"].values())
    assert filled + padding == N_STEPS * 4 * 64


def test_every_conversation_comes_once_an_epoch():
    for kind in ("best_fit", "none"):
        loader = build(config(kind, shuffle=True), rows=1, seq_len=64)
        for _ in range(2):
            seen = []
            for _ in range(loader.packed_rows):
                batch = torch.stack(list(loader.next().batch.values()), dim=1)
                seen += [t for t, labels in samples([batch]) if set(labels) != {IGNORE_INDEX}]
            texts = [TOKENIZER.decode(t) for t in seen]
            assert len(texts) == len(set(texts)) == 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_an_epoch_are_known_where_it_is_packed_first(kind):
    loader = build(config(kind), rows=4, seq_len=64)
    if kind == "none":
        assert loader.packed_rows == 50
    elif kind == "best_fit":
        tokens = loader.plan.sources[0].report["tokens"]
        assert tokens / 64 <= loader.packed_rows < 50
    else:
        assert loader.packed_rows is None
    problems = list(config(kind).check_epochs(2.0))
    assert bool(problems) == (loader.packed_rows is None)


def test_the_rows_of_an_epoch_are_those_of_all_sources():
    both = [Chat.Config(rows=Rows.Config(n=n), weight=float(n)) for n in (61, 40)]
    options = {"n_workers": 0, "max_bad_fraction": 0.5}
    one, other, together = (
        build(ChatLoader.Config(sources=sources, **options), rows=4, seq_len=64).packed_rows
        for sources in (both[:1], both[1:], both)
    )
    assert together == one + other


def test_data_that_can_only_be_read_in_order_is_not_packed_first():
    class Unmarked(StreamedRows):
        @dataclass(kw_only=True, slots=True)
        class Config(Source.Config):
            n: int = 61

            def build_rows(self) -> "StreamedRows":
                return StreamedRows(self)

    loader = ChatLoader.Config(sources=[Chat.Config(rows=Unmarked.Config())], n_workers=0)
    with pytest.raises(ConfigError, match=r"but StreamedRows can only be read in order; set data"):
        build(loader, rows=4, seq_len=64)


def test_the_order_differs_by_epoch_and_seed():
    def order(seed):
        return [b[0, 0].tolist() for b in Ranks(config(), rows=4, seq_len=64, seed=seed).take(3)]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_dropped_and_bad_rows_are_counted_by_reason():
    loader = build(config(shuffle=False), rows=4, seq_len=64)
    for _ in range(12):
        step = loader.next()
    assert step.counts["dropped_too_long"] > 0
    assert step.counts["bad_null"] > 0
    assert 0.5 < step.utilisation <= 1


def test_better_packing_fills_more():
    def utilisation(kind, **fields):
        loader = build(config(kind, **fields), rows=4, seq_len=64)
        return [loader.next() for _ in range(3)][-1].utilisation

    assert utilisation("none") < utilisation("streaming", look_ahead=1)
    assert utilisation("streaming", look_ahead=1) <= utilisation("streaming", look_ahead=12)


def test_preparation_is_kept_and_made_again_when_anything_changes(tmp_path, caplog, monkeypatch):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row(i)) for i in range(61)), encoding="utf-8")
    made = []
    write = prepared._write
    monkeypatch.setattr(prepared, "_write", lambda *args: made.append(1) or write(*args))

    def prepare(seq_len=64, **fields):
        options = {"n_workers": 0, "max_bad_fraction": 0.5}
        rows = Files.Config(path=str(path))
        loader = ChatLoader.Config(sources=[Chat.Config(rows=rows)], **{**options, **fields})
        before = len(made)
        build(loader, rows=4, seq_len=seq_len)
        return len(made) > before

    with caplog.at_level(logging.INFO):
        assert prepare()
    assert "50 conversations of" in caplog.text
    assert "dropped: too_long" in caplog.text
    assert "% filled" in caplog.text
    assert not prepare()
    assert prepare(seq_len=80)
    assert prepare(learn="last")
    assert prepare(too_long="cut")
    assert prepare(date="2025-01-01")
    assert not prepare(seed=5)
    monkeypatch.setattr(prepared, "_code_version", lambda: "new")
    assert prepare()
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(row(1)))
    assert prepare()


def test_an_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared.np, "save", lambda *args: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(
        DataError, match=r"cannot keep the prepared rows in .*full.*set cache_folder"
    ):
        build(config("best_fit"), rows=4, seq_len=64)
    assert [f.suffix for f in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_left_to_learn_is_an_error_before_the_first_step(kind):
    with pytest.raises(
        DataError, match=r"nothing is left to learn|there is no text in it"
    ) as error:
        build(config(kind), rows=4, seq_len=8)
    assert "too_long" in str(error.value)


def test_too_few_conversations_for_a_batch():
    small = ChatLoader.Config(sources=[Chat.Config(rows=Rows.Config(n=4))], n_workers=0)
    with pytest.raises(DataError, match="too little data"):
        build(small, rows=4, seq_len=64)


def test_several_sources_are_mixed_by_weight(tmp_path):
    sources = [
        Chat.Config(rows=Rows.Config(n=61), weight=3.0),
        Chat.Config(rows=Docstrings.Config(split="validation"), weight=1.0),
    ]
    loader = ChatLoader.Config(
        sources=sources, n_workers=0, packing="streaming", max_bad_fraction=0.5
    )
    run = Ranks(loader, rows=2, seq_len=128)
    run.take(25)
    tokens = np.sum([stream["tokens"] for stream in run.state["streams"].values()], axis=0)
    assert abs(tokens[0] / tokens.sum() - 0.75) < 0.08


def test_files_of_every_format(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"instruction": f"q {i}", "output": f"answer {i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    lines = ["instruction,output", *(f"{r['instruction']},{r['output']}" for r in rows)]
    (tmp_path / "c.csv").write_text("\r\n".join(lines), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.csv", "d.parquet"):
        opened = Files.Config(
            path=str(tmp_path / name), cache_folder=str(tmp_path / "plain")
        ).build_rows()
        assert [opened.read(i) for i in range(20)] == rows
        assert name in opened.place(3)
    (tmp_path / "e.txt").write_text("some text", encoding="utf-8")
    assert Files.Config(path=str(tmp_path / "e.txt")).build_rows().read(0) == {"text": "some text"}


def test_data_sets_of_the_hub(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(150)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    opened = HuggingFace.Config(name=str(tmp_path / "saved")).build_rows()
    assert opened.read(3) == rows[3]
    assert opened.fingerprint() != ""
    streamed = HuggingFace.Config(name=str(tmp_path / "saved"), streaming=True).build_rows()
    assert list(streamed.rows(start=70, shuffle_seed=None)) == rows[70:]


def test_questions_about_the_running_python():
    train, held_out = (Docstrings.Config(split=s).build_rows() for s in ("train", "validation"))
    assert len(train) > 1000
    assert len(held_out) > 30
    asked = [
        {r["messages"][0]["content"] for r in map(s.read, range(len(s)))} for s in (train, held_out)
    ]
    assert not asked[0] & asked[1]
    dedent = next(
        r["messages"] for r in map(train.read, range(len(train)))
        if "`textwrap.wrap`" in r["messages"][0]["content"] or "`textwrap.dedent`" in r["messages"][0]["content"]
    )  # fmt: skip
    assert dedent[1]["role"] == "assistant"
    with pytest.raises(ConfigError, match="wrap it in a Chat source"):
        Docstrings.Config().build()


def test_what_does_not_go_together_is_refused():
    wrong = ChatLoader.Config(
        sources=[
            Docstrings.Config(),
            Chat.Config(rows=StreamedRows.Config(), columns={"question": "q"}),
        ],
        look_ahead=0,
        date="today",
    )
    problems = "\n".join(map(str, check_tree(wrong, 1)))
    for text in (
        "sources.0=Docstrings.Config: is no source of conversations; wrap it",
        "sources.1.columns.question=q: is a column of no format; name one of messages",
        "packing=best_fit: needs all rows at once, but sources.1.rows is streamed; set packing=streaming",
        "look_ahead=0: is less than 1",
        "date=today: is no date; write YYYY-MM-DD",
    ):
        assert text in problems
    with pytest.raises(ConfigError, match="read by ChatLoader only"):
        Chat.Config(rows=Docstrings.Config()).build()


def test_a_chat_loader_survives_json():
    loader = ChatLoader.Config(
        sources=[Chat.Config(rows=Docstrings.Config(), columns={"instruction": "q"})]
    )
    assert from_dict(to_dict(loader)) == loader
