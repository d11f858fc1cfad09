"""Samples of a model that is cut over ranks: the texts of one process, written once, and training goes on as without."""

import json

import pytest
import torch

from tests.tiny import running, tiny, tiny_model, weights
from torchtitan.models.layers.attention import GQA
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.training.samples import Samples

PROMPTS = ["def main", "x", "The documentation of"]


def config_of(folder, degrees, moe, *, samples):
    config = tiny(folder, steps=3, seq_len=32, global_batch_rows=4)
    config.model = (
        qwen3("debug_moe") if moe else tiny_model(attention=GQA.Config(n_heads=4, n_kv_heads=2))
    )
    config.model.init_std = 0.4  # far from uniform, so that rounding decides no token
    config.optimizer.lr = 1e-4
    for name, degree in degrees.items():
        if name == "context":
            config.parallelism.context.kind = degree
        else:
            setattr(config.parallelism, name, degree)
    if samples:
        config.samples = Samples.Config(every_n_steps=2, prompts=PROMPTS, max_new_tokens=6)
    return config


def trained(folder, degrees, moe, samples):
    with running(config_of(folder, degrees, moe, samples=samples)) as trainer:
        first = trainer.samples.run() if samples else None
        losses = []
        step = trainer.train_step

        def recording(microbatches):
            done = step(microbatches)
            losses.append((done.loss.item(), done.grad_norm.item()))
            return done

        trainer.train_step = recording
        trainer.train()
        return first, losses, weights(trainer)


@pytest.mark.parametrize(
    ("degrees", "world_size", "moe"),
    [
        ({"dp_shard": 2}, 2, False),
        ({"tp": 2}, 2, False),
        ({"cp": 2}, 2, False),
        ({"cp": 2, "context": "ulysses"}, 2, False),
        ({"dp_shard": 2, "tp": 2}, 4, False),
        ({"dp_shard": 2, "ep": 2}, 2, True),
        ({"tp": 2, "ep": 2}, 2, True),
    ],
    ids=str,
)
def test_ranks_write_what_one_process_writes(ranks, tmp_path, degrees, world_size, moe):
    ((want, _, _),) = ranks(trained, 1, tmp_path / "one", {}, moe, True)
    folder = tmp_path / "many"
    found = ranks(trained, world_size, folder, degrees, moe, True)
    without = ranks(trained, world_size, tmp_path / "without", degrees, moe, False)
    for (first, losses, new), (_, wanted, old) in zip(found, without, strict=True):
        assert first == want
        assert losses == wanted
        assert all(torch.equal(new[name], old[name]) for name in old)
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == [2] * 3 + [3] * 3
