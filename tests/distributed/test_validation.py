import json
import os

import pytest
import torch

from tests.tiny import running, tiny, weights
from torchtitan.batch import IGNORE_INDEX
from torchtitan.data.embedded import Embedded
from torchtitan.data.files import Files
from torchtitan.data.loader import Loader
from torchtitan.errors import DataError
from torchtitan.training.validation import Validation


def with_validation(folder, **training):
    config = tiny(folder, **training)
    config.validation = Validation.Config(
        every_n_steps=2,
        steps=3,
        data=Loader.Config(
            sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0
        ),
    )
    return config


def evaluate(folder, micro_batch_rows):
    with running(with_validation(folder, micro_batch_rows=micro_batch_rows)) as trainer:
        before = weights(trainer)
        first = trainer.validation.run()
        second = trainer.validation.run()
        assert first == second
        after = weights(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert trainer.models["policy"].model.training
        return first


def plain_mean(folder):
    """The loss of each token of the validation rows, averaged in one go from dense logits."""
    with running(with_validation(folder)) as trainer:
        model = trainer.config.model.build()
        model.load_state_dict(weights(trainer))
        losses = []
        loader = trainer._open_loader(trainer.config.validation.data)
        for _ in range(3):
            batch = loader.next().batch
            hidden = model(*(batch[name] for name in model.batch_fields))
            logits = hidden @ model.head.weight.t()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                batch["labels"].flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="none",
            )
            losses.append(loss[batch["labels"].flatten() != IGNORE_INDEX])
        loader.close()
        return torch.cat(losses).mean().item()


@pytest.mark.parametrize(("world_size", "micro_batch_rows"), [(1, None), (1, 4), (2, 1), (4, None)])
def test_equals_a_plain_mean(ranks, tmp_path, world_size, micro_batch_rows):
    (want,) = ranks(plain_mean, 1, tmp_path / "plain")
    for metrics in ranks(evaluate, world_size, tmp_path / "ours", micro_batch_rows):
        assert metrics["validation_loss"] == pytest.approx(want, rel=1e-6)
        assert metrics["validation_perplexity"] == pytest.approx(
            torch.tensor(want).exp().item(), rel=1e-4
        )


def losses(folder, validate):
    config = with_validation(folder, steps=5)
    if not validate:
        config.validation = None
    with running(config) as trainer:
        trainer.train()
        return weights(trainer)


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_in_between_changes_nothing(ranks, tmp_path, world_size):
    without = ranks(losses, world_size, tmp_path / "without", False)[0]
    between = ranks(losses, world_size, tmp_path / "with", True)[0]
    assert all(torch.equal(without[name], between[name]) for name in without)


def test_problems():
    config = Validation.Config(
        every_n_steps=-1, steps=0, data=Loader.Config(sources=[Embedded.Config()], shuffle=True)
    )
    assert [p.path for p in config.check()] == ["steps", "every_n_steps", "data.shuffle"]


def run_with_a_row_that_one_rank_cannot_read(folder):
    config = with_validation(folder / "run", global_batch_rows=2)
    rows = [json.dumps({"text": "word " * 100}) for _ in range(6)]
    rows[2] = "{broken"
    (folder / f"rows-{os.getpid()}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    config.validation.steps = 9
    config.validation.data = Loader.Config(
        sources=[Files.Config(path=str(folder / f"rows-{os.getpid()}.jsonl"))],
        shuffle=False,
        n_workers=0,
        bad_rows="error",
    )
    with running(config) as trainer, pytest.raises(DataError) as error:
        trainer.train()
    return str(error.value)


def test_all_ranks_hear_of_a_bad_row_of_one(ranks, tmp_path):
    texts = ranks(run_with_a_row_that_one_rank_cannot_read, 2, tmp_path, timeout_s=60)
    assert sum("line 3: broken JSON" in text for text in texts) == 1, texts
    assert sum("another rank has no data" in text for text in texts) == 1, texts
