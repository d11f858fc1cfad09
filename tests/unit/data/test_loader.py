import json
import logging
import multiprocessing
import os
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.helpers import (
    TOKENIZER,
    Ranks,
    StreamedTexts,
    Texts,
    build,
    documents,
    run_on,
    same,
)
from torchtitan.batch import IGNORE_INDEX
from torchtitan.data import Embedded, Files, Loader
from torchtitan.errors import ConfigError, DataError

TEXTS = [f"Text number {i}. " + "It goes on. " * (i % 5) for i in range(41)]
GRID = [(ranks, workers) for ranks in (1, 2, 4) for workers in (0, 1, 2)]
KINDS = [Texts, StreamedTexts]
N_STEPS = 12  # of 4 rows of 32 tokens: more than one epoch of TEXTS


def config(kind: type = Texts, **fields) -> Loader.Config:
    return Loader.Config(sources=[kind.Config(texts=TEXTS)], **fields)


def straight(kind: type, n_steps: int = N_STEPS) -> tuple[list[torch.Tensor], dict]:
    run = Ranks(config(kind, n_workers=0), rows=4)
    batches = run.take(n_steps)
    return batches, run.state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "workers"), GRID)
def test_the_global_batch_does_not_depend_on_ranks_or_workers(kind, ranks, workers):
    batches, state = straight(kind)
    run = Ranks(config(kind, n_workers=workers), ranks=ranks, rows=4)
    assert same(run.take(N_STEPS), batches)
    assert run.state["streams"] == state["streams"]
    assert sum(sum(stream["taken"]) for stream in state["streams"].values()) > len(TEXTS)
    run.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "workers"), GRID)
def test_resuming_goes_on_exactly_with_any_number_of_ranks(kind, ranks, workers):
    """A run, its resume with other ranks and workers over the epoch edge, and a resume of that."""
    batches, _ = straight(kind)
    first = Ranks(config(kind, n_workers=workers), ranks=ranks, rows=4)
    taken = first.take(3)
    first.close()
    second = Ranks(
        config(kind, n_workers=(workers + 1) % 3), ranks=4 // ranks, rows=4, state=first.state
    )
    taken += second.take(6)
    second.close()
    third = Ranks(config(kind, n_workers=workers), ranks=ranks, rows=4, state=second.state)
    taken += third.take(N_STEPS - 9)
    third.close()
    assert same(taken, batches)


def test_the_state_is_that_of_the_batch_delivered_not_of_what_is_prefetched():
    run = Ranks(config(n_workers=2, prefetch=4), rows=4)
    reference = Ranks(config(n_workers=0), rows=4)
    for _ in range(3):
        run.next()
        time.sleep(0.1)  # let the workers run ahead
        reference.next()
        assert run.state == reference.state
    run.close()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(12, 60), min_size=4, max_size=30),
    ranks=st.sampled_from([1, 2, 4]),
    stop=st.integers(1, 8),
    shuffle=st.booleans(),
)
def test_no_document_is_lost_or_repeated(sizes, ranks, stop, shuffle):
    """Reads until every stream is past the first epoch, with a resume on other ranks on the way."""
    texts = [f"{i}: " + "word " * size for i, size in enumerate(sizes)]
    loaders = Loader.Config(sources=[Texts.Config(texts=texts)], n_workers=0, shuffle=shuffle)
    run = Ranks(loaders, ranks=ranks, rows=4, seq_len=16)
    batches = run.take(stop)
    run = Ranks(loaders, ranks=4 // ranks, rows=4, seq_len=16, state=run.state)
    per_stream = [-(-(len(texts) - stream) // 4) for stream in range(4)]  # of the first epoch
    while any(len(documents(batches, stream)) < per_stream[stream] for stream in range(4)):
        batches += run.take(1)
    first_epoch = [
        text for stream in range(4) for text in documents(batches, stream)[: per_stream[stream]]
    ]
    assert sorted(first_epoch) == sorted(texts)


def test_a_batch_has_its_fields_and_dtypes():
    step = build(Loader.Config(sources=[Embedded.Config()], n_workers=0), ranks=2).next()
    assert list(step.batch) == ["tokens", "labels", "positions", "document_ids"]
    for tensor in step.batch.values():
        assert tensor.shape == (4, 32)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    tokens, labels = step.batch["tokens"], step.batch["labels"]
    assert torch.equal(
        tokens[:, 1:][labels[:, :-1] != IGNORE_INDEX],
        labels[:, :-1][labels[:, :-1] != IGNORE_INDEX],
    )
    assert step.wait_s >= 0
    assert step.counts == {"documents": 4}


def test_the_order_follows_the_seed_and_the_seed_of_the_loader_wins():
    def first(seed: int, own: int | None = None, shuffle: bool = True) -> torch.Tensor:
        return Ranks(config(n_workers=0, seed=own, shuffle=shuffle), rows=4, seed=seed).next()

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert torch.equal(first(1, own=5), first(2, own=5))
    assert torch.equal(first(1, shuffle=False), first(2, shuffle=False))


def test_rewind_gives_the_same_batches_again():
    loader = build(config(n_workers=1, shuffle=False), rows=4)
    first = [loader.next().batch["tokens"] for _ in range(3)]
    loader.rewind()
    assert same([loader.next().batch["tokens"] for _ in range(3)], first)
    loader.close()


def test_no_more_workers_than_rows():
    loader = build(config(n_workers=16), rows=4, ranks=2)
    assert loader.n_workers == 2


def test_workers_do_not_touch_the_random_numbers_of_the_run():
    before = torch.random.get_rng_state()
    loader = build(config(n_workers=1), rows=4)
    loader.next()
    loader.close()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_the_first_signal(signal_number):
    """A signal to the process group must not take the batches away that come before the last save."""
    before = set(torch.multiprocessing.active_children())
    loader = build(config(n_workers=1), rows=4)
    loader.next()
    (worker,) = set(torch.multiprocessing.active_children()) - before
    os.kill(worker.pid, signal_number)
    time.sleep(0.1)
    for _ in range(5):
        loader.next()
    loader.close()
    worker.join(10)
    assert not worker.is_alive()


def test_a_worker_that_dies_is_a_data_error():
    before = set(torch.multiprocessing.active_children())
    loader = build(config(n_workers=1, prefetch=1), rows=4)
    loader.next()
    (worker,) = set(torch.multiprocessing.active_children()) - before
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        DataError, match=r"a data worker died .*n_workers=0 reads the data in the training process"
    ):
        run_on(loader)
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_of_the_data_arrives_without_the_traceback_of_a_worker(workers, tmp_path):
    rows = [json.dumps({"text": text}) for text in TEXTS * 10]
    rows[300] = "{broken"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    from_files = Loader.Config(
        sources=[Files.Config(path=str(path))], n_workers=workers, shuffle=False, bad_rows="error"
    )
    loader = build(from_files, rows=4)
    with pytest.raises(DataError, match=r"^bad row: .*rows.jsonl line 301: broken JSON") as caught:
        run_on(loader)
    assert "Traceback" not in str(caught.value)


def test_bad_rows_are_shown_ten_times_and_counted(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": "good " * 5}) if i % 4 else "null" for i in range(200)]
    path.write_text("\n".join(rows), encoding="utf-8")
    loaders = Loader.Config(
        sources=[Files.Config(path=str(path))], n_workers=2, max_bad_fraction=0.5
    )
    loader = build(loaders, rows=4, seq_len=64)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            counts = loader.next().counts
    loader.close()
    assert counts["bad_broken"] > 15
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 11
    assert "rows.jsonl line" in shown[0]
    assert "not a JSON object but a NoneType" in shown[0]
    assert shown[-1] == "further bad rows are counted, not shown"


def test_counts_go_on_over_a_resume():
    run = Ranks(config(n_workers=0), rows=4)
    run.take(5)
    documents_before = run.steps[0].counts["documents"]
    resumed = Ranks(config(n_workers=0), ranks=2, rows=4, state=run.state)
    resumed.next()
    straight_on = run.next() is not None and run.steps[0].counts["documents"]
    assert (
        sum(step.counts["documents"] for step in resumed.steps) == straight_on >= documents_before
    )


def test_a_state_of_another_global_batch_is_refused():
    state = Loader.merge_states([build(config(n_workers=0), rows=4).next().state])
    with pytest.raises(DataError, match=r"data position is for global_batch_rows=4, now it is 8"):
        build(config(n_workers=0), rows=8).load_state(state)


def test_a_state_of_other_data_is_refused():
    state = Loader.merge_states([build(config(n_workers=0), rows=4).next().state])
    fewer = Loader.Config(sources=[Texts.Config(texts=TEXTS[:-1])], n_workers=0)
    with pytest.raises(DataError, match=r"for sources with \[41\] rows, now they have \[40\]"):
        build(fewer, rows=4).load_state(state)


def test_ranks_must_divide_the_global_batch():
    with pytest.raises(
        ConfigError, match=r"global_batch_rows=6 is not a multiple of the 4 data ranks"
    ):
        build(config(), rows=6, ranks=4)


def test_check_names_what_is_wrong():
    bad = Loader.Config(sources=[], n_workers=-1, prefetch=0, max_bad_fraction=2.0)
    assert [str(problem) for problem in bad.check()] == [
        "sources=[]: is empty; list at least one source",
        "n_workers=-1: is negative; set 0 or more",
        "prefetch=0: is less than 1; set 1 or more",
        "max_bad_fraction=2.0: is not in 0..1; set a fraction, such as 0.01",
    ]
    assert [str(problem) for problem in Texts.Config(weight=0.0).check()] == [
        "weight=0.0: is not greater than 0; set a positive weight or remove the source"
    ]
    assert not list(config().check())


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_two_sources_are_mixed_alike_by_any_number_of_workers(workers):
    mixed = [Texts.Config(texts=TEXTS, weight=2.0), StreamedTexts.Config(texts=TEXTS[::-1])]
    reference = Ranks(Loader.Config(sources=mixed, n_workers=0), rows=4).take(10)
    run = Ranks(Loader.Config(sources=mixed, n_workers=workers), ranks=2, rows=4)
    assert same(run.take(10), reference)
    run.close()
    tokens = [sum(stream["tokens"][s] for stream in run.state["streams"].values()) for s in (0, 1)]
    assert tokens[0] / sum(tokens) == pytest.approx(2 / 3, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_two_sources_of_one_length_have_orders_of_their_own(kind):
    """Else a mixture would always show the same pairs of rows together."""
    sources = [kind.Config(texts=[f"{word}{i:02d}" for i in range(40)]) for word in "ab"]
    run = Ranks(Loader.Config(sources=sources, n_workers=0), rows=2)
    batches = run.take(10)
    texts = [text for stream in (0, 1) for text in documents(batches, stream)]
    first, second = ([text[1:] for text in texts if text[0] == word] for word in "ab")
    assert len(first) > 5 < len(second)
    assert first[:5] != second[:5]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_in_use_goes_back_to_a_state(workers):
    run = Ranks(config(n_workers=workers), rows=4)
    batches, states = [], []
    for _ in range(5):
        batches.append(run.next())
        states.append(run.state)
    for at in (2, 0, 3):
        run.loaders[0].load_state(json.loads(json.dumps(states[at])))
        assert torch.equal(run.next(), batches[at + 1])
    run.close()


def test_one_text_file_fills_a_batch_with_different_rows(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Sentence {i} of the book. " for i in range(400)), encoding="utf-8")
    batch = build(Loader.Config(sources=[Files.Config(path=str(path))], n_workers=0)).next().batch
    assert len({tuple(row) for row in batch["tokens"].tolist()}) == 8
    assert TOKENIZER.decode(batch["tokens"][0].tolist()).strip()


def test_the_first_batch_is_mixed_by_weight_too():
    a, b = (
        Texts.Config(texts=[word * 50] * 20, weight=weight)
        for word, weight in ((" a", 3.0), (" b", 1.0))
    )
    batch = build(Loader.Config(sources=[a, b], n_workers=0)).next().batch
    assert [TOKENIZER.decode(row.tolist()[1:3]) for row in batch["tokens"]] == [" a a"] * 6 + [
        " b b"
    ] * 2


def test_workers_are_gone_when_it_is_closed_whoever_holds_their_iterator():
    before = set(multiprocessing.active_children())
    loader = build(config(n_workers=2), rows=4)
    loader.next()
    loader.next()
    held = loader._pieces
    assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    assert not set(multiprocessing.active_children()) - before
    del held
