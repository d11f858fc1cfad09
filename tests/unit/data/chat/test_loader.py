"""Batches of conversations: the same for any number of ranks and workers, and exact on resume."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.helpers import TOKENIZER, Ranks, build, same
from torchtitan.batch import IGNORE_INDEX
from torchtitan.config import check_tree, from_dict, to_dict
from torchtitan.data import Files, HuggingFace, MapSource, SequentialSource, Source, Tokenizer
from torchtitan.data import tokenizer as tokenizer_module
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


class OtherRows(Rows):
    @dataclass(kw_only=True, slots=True)
    class Config(Source.Config):
        n: int = 23

        def build_rows(self) -> "OtherRows":
            return OtherRows(self)

    def read(self, index: int) -> dict:
        return {
            "instruction": f"q other {index}",
            "output": f"answer {index * 7} " * (index % 4 + 1),
        }


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


KINDS = {  # name: (sources with their weights, packing)
    "best_fit": ({Rows: 1.0}, "best_fit"),
    "streaming": ({Rows: 1.0}, "streaming"),
    "streamed": ({StreamedRows: 1.0}, "streaming"),
    "none": ({Rows: 1.0}, "none"),
    "streamed_none": ({StreamedRows: 1.0}, "none"),
    "mixed_best_fit": ({Rows: 3.0, OtherRows: 1.0}, "best_fit"),
    "mixed_streaming": ({OtherRows: 1.0, StreamedRows: 2.0}, "streaming"),
    "mixed_none": ({OtherRows: 2.0, StreamedRows: 1.0}, "none"),
}
GRID = [(ranks, workers) for ranks in (1, 2, 4) for workers in (0, 1, 2)]
CASES = [  # the whole grid of ranks and workers, and a few of it for the rarer kinds
    (kind, *pair)
    for kind in KINDS
    for pair in (GRID[1:] if kind in ("best_fit", "streaming") else [(1, 2), (2, 1), (4, 0)])
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "DEFAULT_FOLDER", str(tmp_path / "cache"))


def config(kind: str = "streaming", **fields) -> ChatLoader.Config:
    weights, packing = KINDS[kind]
    options = {"n_workers": 0, "look_ahead": 5, "max_bad_fraction": 0.5, "packing": packing}
    sources = [Chat.Config(rows=kind.Config(), weight=weight) for kind, weight in weights.items()]
    return ChatLoader.Config(sources=sources, **{**options, **fields})


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


@pytest.mark.parametrize(("kind", "ranks", "workers"), CASES)
def test_the_global_batch_does_not_depend_on_ranks_or_workers(kind, ranks, workers):
    batches, state = take(kind)
    run = Ranks(config(kind, n_workers=workers), ranks=ranks, rows=4, seq_len=64)
    assert same(run.take(N_STEPS), batches)
    assert run.state["streams"] == state["streams"]
    run.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2), (4, 1)])
def test_resuming_goes_on_exactly_over_the_epoch_edge_and_twice(kind, ranks, workers):
    batches, state = take(kind)
    loader = build(config(kind), rows=4, seq_len=64)
    taken = np.sum([s["taken"] for s in state["streams"].values()], axis=0)
    epochs = [n or 61 for n in loader.plan.rows_per_epoch]
    assert any(taken > epochs)  # a source is read beyond its end
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_however_it_is_packed(kind):
    """Packing moves whole samples; it changes neither their tokens nor what is learned of them."""

    def seen(kind, n_steps):
        batches, _ = take(kind, n_steps)
        return {(tuple(t), tuple(ls)) for t, ls in samples(batches) if set(ls) != {IGNORE_INDEX}}

    alone = seen("streaming", 60) | seen("mixed_streaming", 60)
    assert seen(kind, 25) <= alone
    assert len(alone) == 50 + 23


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
    elif kind == "mixed_best_fit":
        assert loader.packed_rows == sum(map(len, loader.plan.sources))
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_differs_by_seed(kind):
    def order(seed):
        run = Ranks(config(kind), rows=4, seq_len=64, seed=seed)
        return [b[0, 0].tolist() for b in run.take(3)]

    assert order(0) == order(0)
    assert order(0) != order(1)


@pytest.mark.parametrize("kind", ["best_fit", "none", "streaming", "streamed"])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_epoch_has_an_order_of_its_own_on_any_number_of_ranks(kind, seed):
    def epochs(ranks):
        run = Ranks(config(kind), ranks=ranks, rows=4, seq_len=64, seed=seed)
        order: list[tuple[int, ...]] = []
        while len(order) < 2 * 50:
            batch = run.next()
            order += [tuple(t) for t, labels in samples([batch]) if set(labels) != {IGNORE_INDEX}]
        run.close()
        return order[:50], order[50:100]

    first, second = epochs(1)
    assert first != second
    assert epochs(2) == (first, second)
    assert epochs(4) == (first, second)


def test_dropped_and_bad_rows_are_counted_by_reason():
    loader = build(config(shuffle=False), rows=4, seq_len=64)
    for _ in range(12):
        step = loader.next()
    assert step.counts["dropped_too_long"] > 0
    assert step.counts["bad_null"] > 0
    assert 0.5 < step.utilisation <= 1


def test_rows_of_a_file_that_are_none_are_counted_by_reason_and_named(tmp_path, caplog):
    """A file as people have them: a byte order mark, CRLF, blank lines, nulls, empty and missing fields."""
    answers = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 9}]
    lines = [
        "\ufeff" + json.dumps({"messages": answers}),
        "",
        "   ",
        json.dumps({"messages": [answers[0], {"role": "assistant", "content": None}]}),
        json.dumps({"messages": None}),
        json.dumps({"messages": []}),
        json.dumps({"messages": [answers[0], {"role": "assistant", "content": ""}]}),
        json.dumps({"text": ""}),
        json.dumps({"prompt": "", "completion": "an empty prompt is legal"}),
        json.dumps({"prompt": "q", "completion": ""}),
        json.dumps({"question": "q"}),
        "{broken",
        json.dumps({"messages": answers[:1]}),
        json.dumps({"messages": answers}),
    ]
    (tmp_path / "chats.jsonl").write_bytes("\r\n".join(lines).encode())
    loader = ChatLoader.Config(
        sources=[Chat.Config(rows=Files.Config(path=str(tmp_path / "chats.jsonl")))],
        n_workers=0,
        max_bad_fraction=0.9,
    )
    with caplog.at_level(logging.WARNING):
        report = build(loader, rows=1, seq_len=64).plan.sources[0].report
    assert report["counts"] == {
        "documents": 3,
        "bad_null": 1,
        "dropped_empty": 3,
        "dropped_no_target": 2,
        "bad_missing_field": 2,
        "bad_broken": 1,
    }
    assert "chats.jsonl line 4 message 2: the content is null" in caplog.text


def test_a_parquet_file_without_rows_and_one_with(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    full = pyarrow.Table.from_pylist([{"instruction": f"q {i}", "output": "a"} for i in range(9)])
    parquet.write_table(full, tmp_path / "full.parquet")
    parquet.write_table(full.slice(0, 0), tmp_path / "empty.parquet")
    rows = Files.Config(path=str(tmp_path / "*.parquet"), cache_folder=str(tmp_path / "plain"))
    loader = build(ChatLoader.Config(sources=[Chat.Config(rows=rows)], n_workers=0), rows=1)
    assert loader.plan.sources[0].report["samples"] == 9
    rows.path = str(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="nothing is left to learn from"):
        build(ChatLoader.Config(sources=[Chat.Config(rows=rows)], n_workers=0), rows=1)


def test_streaming_fills_rows_with_32_conversations_in_view():
    """Lengths as in public sets of instructions; the aim is 0.97."""

    class Lengths(Rows):
        @dataclass(kw_only=True, slots=True)
        class Config(Rows.Config):
            n: int = 5000

            def build_rows(self) -> "Lengths":
                return Lengths(self)

        def read(self, index: int) -> dict:
            words = int(np.exp(np.random.default_rng(index).normal(4.2, 0.8)))
            return {"prompt": "q", "completion": " a" * min(words, 500)}

    loader = ChatLoader.Config(
        sources=[Chat.Config(rows=Lengths.Config())], n_workers=0, packing="streaming"
    )
    built = build(loader, rows=2, seq_len=512)
    assert [built.next().utilisation for _ in range(25)][-1] > 0.98


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

    def prepare(seq_len=64, tokenizer=TOKENIZER, columns=None, **fields):
        options = {"n_workers": 0, "max_bad_fraction": 0.5}
        source = Chat.Config(rows=Files.Config(path=str(path)), columns=columns or {})
        loader = ChatLoader.Config(sources=[source], **{**options, **fields})
        before = len(made)
        loader.build(
            tokenizer=tokenizer,
            seq_len=seq_len,
            global_batch_rows=4,
            dp_rank=0,
            dp_world_size=1,
            seed=0,
        )
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
    assert prepare(packing="none")
    assert prepare(max_bad_fraction=0.6)
    assert prepare(columns={"instruction": "output"})
    shipped = Path(tokenizer_module.__file__).parent / "assets" / "chatml.jinja"
    changed = shipped.read_text(encoding="utf-8") + " "
    assert prepare(tokenizer=Tokenizer.Config(chat_template=changed).build())  # another template
    assert prepare(tokenizer=Tokenizer.Config(eos_token="<|pad|>").build())  # the same one
    assert not prepare(seed=5)
    assert not prepare()
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


@pytest.fixture(scope="module")
def hub_sets(tmp_path_factory):
    """The same conversations as JSON lines, as `save_to_disk` writes them, and as Parquet files in a folder."""
    datasets = pytest.importorskip("datasets")
    tmp_path = tmp_path_factory.mktemp("hub")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q {i}"},
                {"role": "assistant", "content": f"answer {i} " + "and on " * (i % 6)},
            ]
        }
        for i in range(50)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "hub").mkdir()
    for part in range(2):
        whole.shard(2, part, contiguous=True).to_parquet(tmp_path / "hub" / f"{part}.parquet")
    return tmp_path


@pytest.mark.parametrize("packing", ["best_fit", "streaming", "none"])
@pytest.mark.parametrize("form", ["saved", "hub", "hub/*.parquet"])
def test_sets_of_the_hub_give_the_batches_of_their_rows(hub_sets, tmp_path, form, packing):
    """Whole sets: by `HuggingFace`, saved or as Parquet, and the Parquet files by `Files`; also after a resume."""

    def loaders(rows, workers=0):
        return ChatLoader.Config(
            sources=[Chat.Config(rows=rows)], n_workers=workers, packing=packing
        )

    path = str(hub_sets / form)
    rows = HuggingFace.Config(name=path)
    if "*" in form:
        rows = Files.Config(path=path, cache_folder=str(tmp_path))
    plain = Files.Config(path=str(hub_sets / "chats.jsonl"))
    expected = Ranks(loaders(plain), rows=4, seq_len=64).take(12)
    first = Ranks(loaders(rows, workers=2), ranks=2, rows=4, seq_len=64)
    taken = first.take(5)
    first.close()
    second = Ranks(loaders(rows), rows=4, seq_len=64, state=first.state)
    assert same(taken + second.take(7), expected)


@pytest.mark.parametrize("form", ["saved", "hub"])
@pytest.mark.parametrize("packing", ["streaming", "none"])
def test_streamed_sets_of_the_hub(hub_sets, form, packing):
    rows = HuggingFace.Config(name=str(hub_sets / form), streaming=True)

    def loaders(workers):
        return ChatLoader.Config(
            sources=[Chat.Config(rows=rows)], n_workers=workers, packing=packing, look_ahead=4
        )

    straight = Ranks(loaders(0), rows=4, seq_len=64)
    expected = straight.take(16)
    texts = [TOKENIZER.decode(t) for t, ls in samples(expected) if set(ls) != {IGNORE_INDEX}]
    assert len(set(texts)) == 50  # all of them
    first = Ranks(loaders(2), ranks=2, rows=4, seq_len=64)
    taken = first.take(6)
    first.close()
    second = Ranks(loaders(1), ranks=4, rows=4, seq_len=64, state=first.state)
    taken += second.take(7)
    second.close()
    third = Ranks(loaders(0), rows=4, seq_len=64, state=second.state)
    assert same(taken + third.take(3), expected)


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


@pytest.mark.parametrize("longer", [False, True])
def test_a_resumed_stream_may_have_another_seq_len(longer):
    """With a shorter one, some of the samples that wait no longer fit."""
    run = Ranks(config("streaming"), rows=4, seq_len=64)
    run.take(2)
    waiting = [n for stream in run.state["streams"].values() for _, _, n in stream["pending"]]
    seq_len = 96 if longer else max(waiting) - 1
    resumed = Ranks(config("streaming"), rows=4, seq_len=seq_len, state=run.state)
    for tokens in resumed.take(8):
        assert tokens.shape[-1] == seq_len
    run.close()
    resumed.close()


def test_waiting_samples_that_are_not_what_they_were_are_an_error():
    run = Ranks(config("streaming"), rows=4, seq_len=64)
    run.take(2)
    run.state["streams"]["0"]["pending"][0][2] += 1
    resumed = Ranks(config("streaming"), rows=4, seq_len=64, state=run.state)
    with pytest.raises(DataError, match=r"stream 0: it has \d+ tokens, and had \d+ when the checkp"):  # fmt: skip
        resumed.take(1)
    run.close()
    resumed.close()
