"""Checkpoints of several ranks: moved between world sizes, failed on one rank, saved beside training."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RanksError
from torchtitan import torch_api
from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.files import HashedFile
from torchtitan.errors import TorchtitanError


class Training:
    """A small FSDP2 model with AdamW, and its state as the checkpointer takes it.

    The layers have 7 and 3 rows, so that the shards are uneven and some ranks hold nothing of a tensor.
    """

    def __init__(self, mesh_shape: tuple[int, ...], seed: int):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
        axes = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = torch_api.init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
        for layer in (self.model[0], self.model[2], self.model):
            torch_api.fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step()

    def step(self) -> float:
        """One update on a fixed batch, the same on all ranks; returns the loss before it."""
        batch = torch.linspace(-1, 1, 32).view(4, 8)
        loss = self.model(batch).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"policy.model.{name}"] = parameter
            for key, value in self.optimizer.state[parameter].items():
                found[f"policy.optimizer.{name}.{key}"] = value
        return found

    def full(self) -> dict[str, torch.Tensor]:
        return {
            name: (t.full_tensor() if isinstance(t, torch_api.DTensor) else t).detach().clone()
            for name, t in self.tensors().items()
        }


def rng_of_rank(rank: int) -> dict[str, torch.Tensor]:
    return {"rng.cpu": torch.full((16,), rank + 1, dtype=torch.uint8)}


def save_training(folder: str, mesh_shape: tuple[int, ...], async_save: bool):
    """Save after two steps; returns the full state and the loss of the third step."""
    training = Training(mesh_shape, seed=1)
    training.step()
    checkpointer = Checkpointer.Config(async_save=async_save).build(folder=folder)
    full = training.full()
    checkpointer.save(2, training.tensors(), rng_of_rank(dist.get_rank()), {"step": 2})
    loss = (
        training.step()
    )  # changes the weights, with collectives, while an asynchronous save is written
    checkpointer.close()
    return full, loss


def load_training(folder: str, mesh_shape: tuple[int, ...]):
    """Load into a training that began elsewhere; returns its full state, the next loss, and this rank's RNG."""
    training = Training(mesh_shape, seed=2)
    checkpointer = Checkpointer.Config().build(folder=folder)
    path = checkpointer.resolve("latest")
    assert path is not None
    rng = {"rng.cpu": torch.full((16,), 99, dtype=torch.uint8)}
    checkpointer.load(path, training.tensors(), rng)
    assert checkpointer.read_state(path) == {"step": 2}
    checkpointer.close()
    return training.full(), training.step(), rng["rng.cpu"][0].item()


@pytest.mark.parametrize(
    ("saved", "loaded", "async_save"),
    [
        ((1,), (1,), False),
        ((2,), (1,), False),
        ((1,), (2,), False),
        ((4,), (2,), True),
        ((2, 2), (2,), False),
        ((2,), (2, 2), True),
        ((2,), (2,), True),
    ],
    ids=str,
)
def test_state_moves_between_meshes(ranks, tmp_path, saved, loaded, async_save):
    n_saved, n_loaded = torch.Size(saved).numel(), torch.Size(loaded).numel()
    expected, loss = ranks(save_training, n_saved, str(tmp_path), saved, async_save)[0]
    found = ranks(load_training, n_loaded, str(tmp_path), loaded)

    assert len(expected) == 16
    for full, next_loss, _ in found:
        assert full.keys() == expected.keys()
        for name in expected:
            assert torch.equal(full[name], expected[name]), name
        assert next_loss == loss if saved == loaded else next_loss == pytest.approx(loss, rel=1e-6)
    assert [rng for *_, rng in found] == [r + 1 if r < n_saved else 99 for r in range(n_loaded)]


def shard_sizes(folder: str):
    """Save a replicated and a sharded tensor; returns the size of this rank's file."""
    mesh = torch_api.init_device_mesh("cpu", (dist.get_world_size(),))
    big = torch_api.distribute_tensor(torch.zeros(1000, 100), mesh, [torch_api.Shard(0)])
    checkpointer = Checkpointer.Config().build(folder=folder)
    checkpointer.save(1, {"big": big, "replicated": torch.zeros(10)}, {}, {})
    path = checkpointer.latest()
    assert path is not None
    return (path / f"__{dist.get_rank()}_0.distcp").stat().st_size


def test_each_rank_writes_its_own_part(ranks, tmp_path):
    for size in ranks(shard_sizes, 2, str(tmp_path)):
        assert 200_000 < size < 210_000


def outcome_of(step: Callable[[], object]) -> str:
    try:
        step()
    except TorchtitanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail_on_rank_1(folder: str, async_save: bool):
    """A disk that is full on rank 1 only; returns the error and what is left, then that of a good save."""
    checkpointer = Checkpointer.Config(async_save=async_save).build(folder=folder)
    rank_tensors = {"rng": torch.zeros(50_000, dtype=torch.uint8)}
    checkpointer.save(1, {}, rank_tensors, {})
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    def save_and_wait() -> None:
        checkpointer.save(2, {}, rank_tensors, {})
        checkpointer.wait()

    outcome = outcome_of(save_and_wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    left = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    dist.barrier()
    return outcome, left, outcome_of(save_and_wait)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failure_on_one_rank_is_an_error_on_all(ranks, tmp_path, async_save):
    for outcome, left, after in ranks(fail_on_rank_1, 2, str(tmp_path), async_save, timeout_s=30):
        assert outcome.startswith(
            "CheckpointError: checkpoint of step 2: rank 1: [Errno 27] File too large"
        )
        assert left == ["step-00000001"]
        assert after == "no error"


def unwritable_on_rank_1(folder: str):
    own = folder if dist.get_rank() == 0 else f"{folder}/file"
    return outcome_of(lambda: Checkpointer.Config().build(folder=own))


def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for outcome in ranks(unwritable_on_rank_1, 2, str(tmp_path), timeout_s=30):
        assert "is not writable: rank 1: [Errno 20] Not a directory" in outcome


def resolve_damaged(folder: str):
    """One shard of the newest is damaged: all ranks agree on the one before."""
    checkpointer = Checkpointer.Config().build(folder=folder)
    for step in (1, 2):
        checkpointer.save(step, {}, rng_of_rank(step), {})
    if dist.get_rank() == 0:
        with open(f"{folder}/checkpoints/step-00000002/__1_0.distcp", "r+b") as file:
            file.seek(700)
            file.write(b"?")
    dist.barrier()
    path = checkpointer.resolve("latest")
    named = outcome_of(lambda: checkpointer.resolve(f"{folder}/checkpoints/step-00000002.corrupt"))
    return path.name if path else None, named


def test_all_ranks_fall_back_to_the_same_checkpoint(ranks, tmp_path):
    for name, named in ranks(resolve_damaged, 2, str(tmp_path)):
        assert name == "step-00000001"
        assert "__1_0.distcp has sha256" in named
        assert "(it holds rank/1/rng.cpu)" in named


def mismatch_on_rank_1(folder: str):
    checkpointer = Checkpointer.Config().build(folder=folder)
    checkpointer.save(1, {"weight": torch.ones(4)}, {}, {})
    path = checkpointer.latest()
    assert path is not None
    weight = torch.zeros(4 + dist.get_rank())
    outcome = outcome_of(lambda: checkpointer.load(path, {"weight": weight}, {}))
    return outcome, weight.sum().item()


def test_a_mismatch_on_one_rank_is_an_error_on_all(ranks, tmp_path):
    for outcome, loaded in ranks(mismatch_on_rank_1, 2, str(tmp_path), timeout_s=30):
        assert loaded == 0
        assert "rank 1: 1 of its tensors do not fit this run" in outcome
        assert "wrong shape: weight is float32 [4], this run has float32 [5]" in outcome


def die_while_writing(folder: str):
    """Rank 1 is killed in the middle of its file; rank 0 writes down what it is told."""
    checkpointer = Checkpointer.Config().build(folder=folder)
    checkpointer.save(1, {}, rng_of_rank(dist.get_rank()), {})
    if dist.get_rank() == 1:
        HashedFile.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    outcome = outcome_of(lambda: checkpointer.save(2, {}, rng_of_rank(0), {}))
    Path(folder, "outcome").write_text(outcome, encoding="utf-8")


def test_a_rank_that_dies_while_saving_ends_the_others_and_keeps_the_old(ranks, tmp_path):
    with pytest.raises(RanksError, match="rank 1: the process ended with exit code -9"):
        ranks(die_while_writing, 2, str(tmp_path), timeout_s=30)
    outcome = (tmp_path / "outcome").read_text(encoding="utf-8")
    assert outcome.startswith(
        "DistributedError: checkpoint of step 2: another rank is gone or did not answer"
    )
    survivor = Checkpointer.Config().build(folder=tmp_path).resolve("latest")
    assert survivor is not None
    assert survivor.name == "step-00000001"
