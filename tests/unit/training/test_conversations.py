"""What rows of conversations cost: packing, padding and masks change neither the loss nor the gradients."""

import json

import pytest
import torch

from tests.tiny import running, tiny, tiny_model
from torchtitan.batch import IGNORE_INDEX
from torchtitan.data import Files, Tokenizer
from torchtitan.data.bad_rows import BadRowPolicy
from torchtitan.data.chat.conversation import conversation
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.sample import pack
from torchtitan.data.chat.source import Chat
from torchtitan.data.chat.stream import SamplePacking, SampleStream
from torchtitan.data.feed import Part
from torchtitan.data.stream import FIELDS, new_state
from torchtitan.errors import DataError
from torchtitan.metrics.sinks.jsonl import read_rows
from torchtitan.objectives.next_token import NextToken
from torchtitan.objectives.objective import Context
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer

TOKENIZER = Tokenizer.Config().build()
CHATS = [
    [("2+2?", "4")],
    [("Hi. " * 9, "Hello there. " * 3), ("And?", "No.")],
    [("q", "an answer that is longer than its question")],
]


def encoded(turns):
    roles = ("user", "assistant")
    messages = [
        {"role": r, "content": t} for pair in turns for r, t in zip(roles, pair, strict=True)
    ]
    encoder = ChatLoader.Config(sources=[]).encoder(TOKENIZER, 256)
    return encoder.encode(conversation({"messages": messages}, "here"), "here")


class OneRow:
    """A source that gives all samples as one pack."""

    rows_per_epoch = 1

    def __init__(self, samples):
        self.samples = samples

    def take(self, stream, count):
        return Part(pack(self.samples))


def packed(samples, seq_len):
    """One row with all of the samples, as a batch."""
    stream = SampleStream(
        packing=SamplePacking(look_ahead=1, one_per_row=True),
        number=0, n_streams=1, feeds=[OneRow(samples)], weights=[1.0], tokenizer=TOKENIZER,
        seq_len=seq_len, policy=BadRowPolicy("error", 0.0), on_bad_row=print, state=new_state(1),
    )  # fmt: skip
    row = torch.from_numpy(stream.next_row()).long()[None]  # (1, 4, S)
    return {name: row[:, i] for i, name in enumerate(FIELDS)}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny_model().build().requires_grad_().apply(filled)


def filled(module):
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter, std=0.3)


def cost(model, batches):
    """Sum of the losses over the batches, and its gradients."""
    model.zero_grad()
    objective, total = NextToken.Config().build(), torch.zeros(())
    for batch in batches:
        hidden = model(*(batch[name] for name in model.batch_fields))
        sums = objective.loss(hidden, model.head, batch, Context(totals={}))
        sums.losses["next_token"].backward()
        total += sums.losses["next_token"].detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(left, right):
    torch.testing.assert_close(left[0], right[0], rtol=1e-5, atol=0)
    for name, gradient in left[1].items():
        assert gradient.norm() > 0, name
        assert (gradient - right[1][name]).norm() <= 1e-5 * gradient.norm(), name


def test_a_pack_costs_what_its_conversations_cost_alone(model):
    samples = [encoded(turns) for turns in CHATS]
    length = sum(map(len, samples))
    together = cost(model, [packed(samples, length)])
    alone = cost(model, [packed([sample], len(sample)) for sample in samples])
    assert_same(together, alone)


def test_empty_room_at_the_end_of_a_row_changes_nothing(model):
    """Case of trainers whose padding has position 0 everywhere, or reaches attention as a document of the row's end."""
    samples = [encoded(turns) for turns in CHATS]
    length = sum(map(len, samples))
    full = cost(model, [packed(samples, length)])
    for room in (1, 2, 3, 7, 31, 64):
        batch = packed(samples, length + room)
        assert (batch["labels"][0, length:] == IGNORE_INDEX).all()
        assert batch["positions"][0, length:].tolist() == list(range(room))
        assert set(batch["document_ids"][0, length:].tolist()) == {len(CHATS)}
        assert_same(cost(model, [batch]), full)


def test_what_is_not_learned_has_no_part_in_the_loss(model):
    """The hidden states of tokens without a label may be anything, whatever the objective's options."""
    batch = packed([encoded(turns) for turns in CHATS], 200)
    masked = batch["labels"][0] == IGNORE_INDEX
    assert 0.3 < masked.float().mean() < 1
    with torch.no_grad():
        hidden = model(*(batch[name] for name in model.batch_fields))
        spoiled = hidden.clone()
        spoiled[0, masked] = 1e3 * torch.randn(int(masked.sum()), hidden.shape[-1])
        for options in ({}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}):
            objective = NextToken.Config(**options).build()
            losses = [
                objective.loss(states, model.head, batch, Context(totals={})).losses["next_token"]
                for states in (hidden, spoiled)
            ]
            assert torch.equal(*losses)
            count = objective.normalizers(batch)["next_token"]
            assert count == (~masked).sum()


def step(folder, batches, weight_decay=0.1):
    """One optimizer step of a trainer on given micro-batches; its metrics, and the weights before and after."""
    config = tiny(folder, seq_len=200)
    config.optimizer.weight_decay = weight_decay
    with running(config) as trainer:
        before = {
            n: p.detach().clone() for n, p in trainer.models["policy"].model.named_parameters()
        }
        metrics = trainer.train_step([dict(batch) for batch in batches])
        after = {
            n: p.detach().clone() for n, p in trainer.models["policy"].model.named_parameters()
        }
    return metrics, before, after


def test_a_micro_batch_with_nothing_to_learn_adds_nothing(tmp_path):
    batch = packed([encoded(turns) for turns in CHATS], 200)
    nothing = batch | {"labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
    alone, _, expected = step(tmp_path / "a", [batch])
    for number, batches in enumerate(
        [[batch, nothing], [nothing, batch], [nothing, batch, nothing]]
    ):
        metrics, _, after = step(tmp_path / str(number), batches)
        assert torch.equal(metrics.loss, alone.loss)
        assert metrics.grad_norm.item() == pytest.approx(alone.grad_norm.item(), rel=1e-6)
        for name, weight in after.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_a_step_with_nothing_to_learn_is_loss_0_and_moves_no_weight(tmp_path):
    batch = packed([encoded(turns) for turns in CHATS], 200)
    nothing = batch | {"labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
    metrics, before, after = step(tmp_path, [nothing, nothing], weight_decay=0.0)
    assert metrics.loss.item() == 0.0
    assert metrics.grad_norm.item() == 0.0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_answer_of_one_token_is_learned(tmp_path):
    """Neither is the first token of an answer left out, nor are labels shifted twice."""
    sums = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(5)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)), encoding="utf-8")
    config = tiny(tmp_path / "run", steps=60, seq_len=16, global_batch_rows=3)
    config.schedule = Schedule.Config()
    config.optimizer.lr = 0.03
    config.data = ChatLoader.Config(
        sources=[Chat.Config(rows=Files.Config(path=str(tmp_path / "sums.jsonl")))],
        n_workers=0,
        cache_folder=str(tmp_path),
    )
    with running(config) as trainer:
        trainer.train()
        model = trainer.models["policy"].model
        for row in sums:
            ids = [TOKENIZER.bos_id, *TOKENIZER.encode(row["prompt"])]
            answer = []
            for _ in range(2):
                tokens = torch.tensor([ids + answer])
                with torch.no_grad():
                    hidden = model(
                        tokens, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens)
                    )
                    answer.append(int((hidden[0, -1] @ model.head.weight.t()).argmax()))
            assert answer == [*TOKENIZER.encode(row["completion"]), TOKENIZER.eos_id]
            assert len(answer) == 2


def masked_steps(monkeypatch, masked):
    """Let the steps of these numbers, from 1, have no label."""
    step, number = Trainer.train_step, iter(range(1, 99))

    def masking(self, microbatches):
        if next(number) in masked:
            for batch in microbatches:
                batch["labels"].fill_(IGNORE_INDEX)
        return step(self, microbatches)

    monkeypatch.setattr(Trainer, "train_step", masking)


def test_a_step_that_learns_nothing_is_a_loss_of_0_a_warning_and_a_metric(
    tmp_path, monkeypatch, caplog
):
    masked_steps(monkeypatch, {2, 3})
    with running(tiny(tmp_path)) as trainer:
        trainer.train()
    found = read_rows(tmp_path / "metrics.jsonl")
    assert [row["loss"] == row["grad_norm"] == 0 for row in found] == [False, True, True, False]
    assert [row.get("empty_steps") for row in found] == [None, None, 1, 2]
    assert sum("no token to learn from" in text for text in caplog.messages) == 1


def test_a_run_or_an_epoch_that_learns_nothing_is_an_error(tmp_path, monkeypatch):
    masked_steps(monkeypatch, {1, 2, 3, 4})
    with running(tiny(tmp_path)) as trainer, pytest.raises(DataError, match="4 steps in a row"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoints/step-*"))
    with running(tiny(tmp_path)) as trainer:
        trainer.loader.packed_rows = 9  # of 8 rows a step
        assert trainer._most_empty_steps() == 2
        trainer.step = 1  # as after a resume
        assert trainer._most_empty_steps() == 2
        trainer.loader.packed_rows = None
        assert trainer._most_empty_steps() is None
