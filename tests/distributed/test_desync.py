"""Ranks that hold other bits than they must are named, with the thing and the step."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.distributed.grid import MODELS
from tests.tiny import running, tiny, tiny_model
from torchtitan.errors import DistributedError
from torchtitan.models.layers.attention import GQA
from torchtitan.training.desync import _digest, differences


def test_the_fewer_are_named_first():
    same = {("the step", ()): 3, ("w", (0,)): 5, ("w", (1,)): 9}
    other = {**same, ("w", (0,)): 6}
    assert list(differences([same, same, same])) == []
    assert list(differences([same, other, same])) == ["w of rank 1 is not that of ranks 0, 2"]
    part = {("the step", ()): 4, ("w", (1,)): 9, ("x", ()): 1}  # another part, and one of its own
    assert list(differences([same, part])) == ["the step of rank 0 is not that of rank 1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_any_changed_or_exchanged_element_changes_the_digest(dtype):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    digest = _digest(tensor)
    assert digest.item() == _digest(tensor.clone()).item()
    for i in range(24):
        changed = tensor.clone()
        changed.flatten()[i] += 1
        assert _digest(changed).item() != digest.item()
    assert _digest(tensor.flip(0)).item() != digest.item()
    assert _digest(torch.zeros(0, dtype=dtype)).item() == 0
    assert _digest(torch.tensor(-0.0)).item() != _digest(torch.tensor(0.0)).item()


MESHES = {
    "dp_replicate": {"dp_replicate": 2},
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "tp, whole stream": {"tp": 2, "sequence_parallel": False},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "experts": {"dp_shard": 2, "ep": 2},
}


def train(folder, degrees, harm):
    """What a run of four steps says, if rank 1 does ``harm`` to its trainer before the second."""
    config = tiny(folder)
    config.model = tiny_model(attention=GQA.Config(n_heads=4, n_kv_heads=2))
    if "ep" in degrees:
        config.model = MODELS["moe"]
    config.parallelism.dp_shard = 1
    for name, value in degrees.items():
        setattr(config.parallelism, name, value)
    config.training.compare_ranks_every_n_steps = 4
    with running(config) as trainer:
        step = trainer.train_step

        def harmed(microbatches):
            if trainer.step == 1 and dist.get_rank() == 1 and harm is not None:
                harm(trainer)
            return step(microbatches)

        trainer.train_step = harmed
        try:
            trainer.train()
        except DistributedError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sound_run_is_not_stopped(ranks, tmp_path, mesh):
    assert ranks(train, 2, tmp_path, MESHES[mesh], None) == [""] * 2


@torch.no_grad()
def flip_a_bit(trainer):
    weight = trainer.models["policy"].model.norm.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.view(torch.int32)[3] ^= 1


def read_on(trainer):
    for _ in range(3):
        trainer.loader.next()


def change_the_state(trainer):
    state = trainer.models["policy"].optimizer.state_tensors()["norm.weight.exp_avg"]
    (state.to_local() if hasattr(state, "to_local") else state).add_(1e-3)


HARMS = {
    "a bit of a copy": ({"dp_replicate": 2}, flip_a_bit, "policy.model.norm.weight"),
    "a bit under tp": ({"tp": 2}, flip_a_bit, "policy.model.norm.weight"),
    "optimizer state": ({"tp": 2}, change_the_state, "policy.optimizer.norm.weight.exp_avg"),
    "the data position": ({"tp": 2}, read_on, "the data position"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_the_thing_and_the_ranks_are_named(ranks, tmp_path, harm):
    degrees, do, name = HARMS[harm]
    for text in ranks(train, 2, tmp_path, degrees, do):
        assert text.startswith("step 4: ranks that must hold the same do not: ")
        assert re.search(rf"{re.escape(name)} of rank \d is not that of rank \d", text), text
