"""A run of epochs: its steps are counted from the packed rows, the same on any number of ranks and after a resume."""

import contextlib
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.tiny import running, tiny, weights
from torchtitan.config import check_tree, from_dict
from torchtitan.data import Files
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat
from torchtitan.errors import CheckpointError, ConfigError, Preempted
from torchtitan.optim.schedule import Schedule

N_CHATS = 41


def chats(folder: Path, n: int = N_CHATS) -> Path:
    path = folder / "chats.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"instruction": f"q {i}", "output": f"a{i} " + "x " * (i % 9)} for i in range(n)]
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def config(folder, data: Path, *, epochs: float | None = 2, packing="best_fit", **training):
    tree = tiny(folder, steps=None, epochs=epochs, seq_len=64, global_batch_rows=4, **training)
    tree.data = ChatLoader.Config(
        sources=[Chat.Config(rows=Files.Config(path=str(chats(data))))],
        n_workers=0,
        packing=packing,
        cache_folder=str(data / "cache"),
    )
    tree.schedule = Schedule.Config(warmup_fraction=0.2, decay="cosine")
    return tree


def run(folder, data, stop_after=None, **fields):
    """Losses, rates and documents by step, and the final weights; stopped by a signal after some steps."""
    steps: dict[int, tuple[float, float, list[tuple[int, ...]]]] = {}
    with running(config(folder, data, **fields)) as trainer:
        train_step = trainer.train_step

        def recording(microbatches):
            metrics = train_step(microbatches)
            documents = [d for batch in microbatches for d in learned_documents(batch)]
            steps[trainer.step] = (metrics.loss.item(), metrics.lr, documents)
            if trainer.step == stop_after:
                trainer.stop.received = "SIGTERM"
            return metrics

        trainer.train_step = recording
        with contextlib.nullcontext() if stop_after is None else pytest.raises(Preempted):
            trainer.train()
        return steps, weights(trainer), trainer.loader.packed_rows


def learned_documents(batch):
    for tokens, labels, ids in zip(
        batch["tokens"], batch["labels"], batch["document_ids"], strict=True
    ):
        for number in ids.unique():
            if (labels[ids == number] >= 0).any():
                yield tuple(tokens[ids == number].tolist())


def test_steps_are_counted_from_the_packed_rows(ranks, tmp_path):
    ((steps, _, packed),) = ranks(run, 1, tmp_path / "a", tmp_path)
    assert len(steps) == -(-2 * packed // 4)
    assert packed % 4  # so that the last step is more than what was asked for
    seen = Counter(document for _, _, documents in steps.values() for document in documents)
    assert len(seen) == N_CHATS
    assert set(seen.values()) <= {2, 3}
    saved = json.loads((tmp_path / "a" / "config.json").read_text())
    tree = from_dict(saved)
    assert (tree.training.steps, tree.training.epochs) == (len(steps), None)
    assert tree.schedule.steps == len(steps)
    assert check_tree(tree, 1) == []
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().split("\n") if line]  # fmt: skip
    assert rows[-1]["epoch"] == len(steps) * 4 / packed >= 2
    assert rows[0]["epoch"] == 4 / packed


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stopped_run_goes_on_exactly_over_the_epoch_edge(ranks, tmp_path, world_size, packing):
    fields = {"packing": packing}
    straight = ranks(run_with, world_size, tmp_path / "a", tmp_path, None, fields)
    second = straight[0][2] // 4 + 2  # a step of the second epoch
    parts = [
        ranks(run_with, world_size, tmp_path / "b", tmp_path, stop, fields)
        for stop in (3, second, None)  # a resume, and a resume of that
    ]
    for rank in range(world_size):
        steps = {k: v for part in parts for k, v in part[rank][0].items()}
        assert sum(len(part[rank][0]) for part in parts) == len(steps)
        assert steps == straight[rank][0]
        for name, tensor in straight[rank][1].items():
            assert torch.equal(tensor, parts[-1][rank][1][name]), name
    last = max(straight[0][0])
    assert last * 4 >= 2 * straight[0][2]
    rates = [rate for _, rate, _ in straight[0][0].values()]
    assert rates[-1] == 0.0  # the fall ends where the run does


def run_with(folder, data, stop_after, fields):
    return run(folder, data, stop_after, **fields)


def test_any_number_of_ranks_trains_the_same_steps(ranks, tmp_path):
    results = [ranks(run, n, tmp_path / str(n), tmp_path) for n in (1, 2, 4)]
    one, *others = [result[0][0] for result in results]
    for other in others:
        assert list(other) == list(one)
        assert [v[0] for v in other.values()] == pytest.approx([v[0] for v in one.values()], rel=1e-5)  # fmt: skip
        assert [v[1] for v in other.values()] == [v[1] for v in one.values()]


def test_other_epochs_are_another_schedule(ranks, tmp_path):
    ranks(run_with, 1, tmp_path / "a", tmp_path, 3, {})
    (text,) = ranks(refused, 1, tmp_path / "a", tmp_path)
    assert "schedule.steps: " in text
    assert "--checkpoint.allow-changes schedule.steps" in text


def refused(folder, data):
    with pytest.raises(CheckpointError) as caught:
        run(folder, data, epochs=3)
    return str(caught.value)


def test_a_part_of_an_epoch_and_a_schedule_that_does_not_fit(tmp_path, caplog):
    with caplog.at_level(logging.INFO), running(config(tmp_path / "a", tmp_path, epochs=0.3)) as t:
        packed = t.loader.packed_rows
        assert t.n_steps == -(-0.3 * packed // 4)
    assert f"training.epochs=0.3 of {packed} rows: {t.n_steps} steps of 4 rows" in caplog.text
    tree = config(tmp_path / "b", tmp_path)
    tree.schedule = Schedule.Config(warmup_steps=500)
    refused_while_built(
        tree, r"schedule\.warmup_steps=500: plus .* more than the schedule's .*epochs=2"
    )


def refused_while_built(tree, match):
    """``tree`` is refused while it is built, when the ranks have met."""
    with pytest.raises(ConfigError, match=match):
        tree.build()


def problems(tree):
    return [str(problem) for problem in check_tree(tree, 1)]


def test_epochs_of_unknown_length_are_refused_in_words(tmp_path):
    assert problems(config(tmp_path, tmp_path)) == []
    assert problems(config(tmp_path, tmp_path, packing="none")) == []
    assert problems(config(tmp_path, tmp_path, packing="streaming")) == [
        "training.epochs=2: cannot be counted: data.packing=streaming fills rows while it reads; set "
        "data.packing=best_fit, or training.steps and training.epochs=None"
    ]
    text = tiny(tmp_path, steps=None, epochs=1.5)
    assert problems(text) == [
        "training.epochs=1.5: cannot be counted: Loader packs documents while it reads them, so how many rows they "
        "fill is not known beforehand; set training.steps, and training.epochs=None"
    ]
    refused_while_built(text, r"epochs=1\.5: how many rows .* set training\.steps")


def test_streamed_sets_are_refused_with_epochs(tmp_path):
    from torchtitan.data import HuggingFace  # noqa: PLC0415 - needs datasets

    tree = config(tmp_path, tmp_path, packing="none")
    tree.data.sources = [Chat.Config(rows=HuggingFace.Config(name="org/name", streaming=True))]
    assert problems(tree) == [
        "training.epochs=2: cannot be counted: data.sources.0.rows is streamed, so its end is not known; set its "
        "streaming=False, or training.steps and training.epochs=None"
    ]
