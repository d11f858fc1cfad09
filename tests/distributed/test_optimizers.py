"""Every optimizer moves between meshes, and updates in the backward of FSDP2 as after it."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tiny import full, running, tiny, tiny_model, weights
from torchtitan import torch_api
from torchtitan.errors import ConfigError, NumericsError
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.optim.clipping import Clip, local_and_axes
from torchtitan.optim.muon import Muon
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.param_groups import ParamGroup
from torchtitan.optim.rounding import Noise
from torchtitan.optim.sgd import SGD
from torchtitan.optim.state import local_of
from torchtitan.optim.updates import make_updates
from torchtitan.parallel.fsdp import fsdp_units

GROUPS = [ParamGroup.Config(pattern="layers.*.attention.*", lr_scale=0.5, weight_decay=0.0)]
KINDS = {
    "adamw": AdamW.Config(lr=1e-2, param_groups=GROUPS),
    "adamw bfloat16": AdamW.Config(lr=1e-2, state_dtype="bfloat16", param_groups=GROUPS),
    "adamw int8": AdamW.Config(lr=1e-2, state_dtype="int8", param_groups=GROUPS),
    "adamw int4": AdamW.Config(lr=1e-2, state_dtype="int4", param_groups=GROUPS),
    "adamw float8": AdamW.Config(lr=1e-2, state_dtype="float8", param_groups=GROUPS),
    "muon": Muon.Config(lr=1e-2, param_groups=GROUPS),
    "muon int8": Muon.Config(lr=1e-2, state_dtype="int8", param_groups=GROUPS),
    "sgd": SGD.Config(lr=1e-1, param_groups=GROUPS),
}


def configure(folder, optimizer, steps, *, early=False, tp=1, **training):
    config = tiny(folder, steps=steps, clip_by="parameter", **training)
    config.model = tiny_model(
        dim=64,
        attention=GQA.Config(n_heads=4, n_kv_heads=2),
        feed_forward=SwiGLU.Config(ffn_dim=96),
        vocab_size=4099,  # does not divide by 2 or 4
        tied=True,
    )
    config.optimizer = optimizer
    config.optimizer.in_backward = early
    config.parallelism.tp = tp
    return config


def run(folder, optimizer, steps, options):
    """Losses, and then weights and state, of a run to ``steps``, resumed if there is a checkpoint."""
    config = configure(folder, optimizer, steps, **options)
    losses = []
    with running(config) as trainer:
        step = trainer.train_step

        def recording(microbatches):
            metrics = step(microbatches)
            losses.append(metrics.loss.item())
            return metrics

        trainer.train_step = recording
        trainer.train()
        state = trainer.models["policy"].optimizer.state_tensors()
        return losses, {**weights(trainer), **{name: full(t) for name, t in state.items()}}


def state_at(folder, optimizer, steps, options):
    """What a run of other ranks finds in its checkpoint."""
    return run(folder, optimizer, steps, options)[1]


def slow_but(*quick):
    """All kinds, those not named as slow tests."""
    return [k if k in quick else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]


@pytest.mark.parametrize("kind", slow_but("adamw bfloat16", "adamw int4", "muon int8"))
def test_state_moves_from_2_ranks_to_1_to_4(ranks, tmp_path, kind):
    (straight, _), *_ = ranks(run, 1, tmp_path / "a", KINDS[kind], 6, {})
    losses = []
    saved: dict[str, torch.Tensor] = {}
    for world_size, steps in ((2, 2), (1, 4), (4, 6)):
        found = (
            ranks(state_at, world_size, tmp_path / "b", KINDS[kind], steps - 2, {}) if saved else []
        )
        for tensors in found:  # nothing is left to train: what was loaded, in full
            assert tensors.keys() == saved.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, saved[name]), name
        (more, saved), *_ = ranks(run, world_size, tmp_path / "b", KINDS[kind], steps, {})
        losses += more
    assert losses == pytest.approx(straight, rel=TOLERANCE.get(kind, 1e-5))


# Where a code or a bfloat16 is the nearest of two by a hair, another order of a gradient's sum picks the other.
TOLERANCE = {"adamw int8": 1e-4, "adamw int4": 1e-3, "adamw float8": 1e-3, "adamw bfloat16": 1e-4, "muon": 1e-3, "muon int8": 1e-3}  # fmt: skip


@pytest.mark.parametrize("parameter_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", slow_but("adamw int4"))
def test_in_the_backward_every_bit_is_the_same(ranks, tmp_path, kind, parameter_dtype):
    options = {"parameter_dtype": parameter_dtype}
    plain = ranks(run, 2, tmp_path / "plain", KINDS[kind], 3, options)
    early = ranks(run, 2, tmp_path / "early", KINDS[kind], 3, {"early": True, **options})
    for (losses, tensors), (want_losses, want_tensors) in zip(early, plain, strict=True):
        assert losses == want_losses
        assert tensors.keys() == want_tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, want_tensors[name]), name


@pytest.mark.parametrize("kind", ["muon", pytest.param("adamw int8", marks=pytest.mark.slow)])
def test_tensor_parallel_shards_are_updated_as_whole_matrices(ranks, tmp_path, kind):
    (want, _), *_ = ranks(run, 1, tmp_path / "alone", KINDS[kind], 4, {})
    for name, world_size, options in [
        ("tp", 2, {"tp": 2}),
        ("tp and fsdp", 4, {"tp": 2, "early": True}),
    ]:
        optimizer = dataclasses.replace(KINDS[kind], block_size=16)  # tp cuts 96 and 64 columns
        for losses, _ in ranks(run, world_size, tmp_path / name, optimizer, 4, options):
            assert losses == pytest.approx(want, rel=2e-3)


def cut_blocks(folder):
    config = configure(folder, AdamW.Config(state_dtype="int8"), 1, tp=2)
    with pytest.raises(ConfigError) as caught:
        config.build()
    return str(caught.value)


def test_blocks_that_tensor_parallel_cuts_are_refused(ranks, tmp_path):
    for text in ranks(cut_blocks, 2, tmp_path):
        assert text.startswith("optimizer.state_dtype=int8: layers.0.attention.out_proj.weight: ")
        assert (
            "its 64 columns over 2 ranks cut blocks of 64 elements; set optimizer.block_size=32"
            in text
        )


def gradients_alive(folder, early):
    """The most units that had gradients at any update, whole or sharded; the most bytes of these; and those of all."""
    config = configure(folder, AdamW.Config(), 1, early=early)
    config.model.tied = False  # a shared table's gradient waits for its last user, the embedding
    with running(config) as trainer:
        model, optimizer = trainer.models["policy"].model, trainer.models["policy"].optimizer
        units = {unit: name for name, unit in model.named_modules() if unit in fsdp_units(model)}
        update, most_units, most_bytes = optimizer.update, 0, 0

        def counting(parameters, skip):  # called before the gradient is freed
            nonlocal most_units, most_bytes
            sharded = {slot.name: slot.parameter for slot in optimizer.slots.values()}
            gathered = dict(model.named_parameters())
            alive = {
                n for each in (sharded, gathered) for n, p in each.items() if p.grad is not None
            }
            # The root unit, "", has what is left: a norm, whose gradient FSDP reduces at the end.
            most_units = max(most_units, len({unit_of(n, units.values()) for n in alive} - {""}))
            storages = {
                local_of(p.grad).untyped_storage().data_ptr(): local_of(p.grad).untyped_storage()
                for p in sharded.values()
                if p.grad is not None
            }
            most_bytes = max(most_bytes, sum(storage.nbytes() for storage in storages.values()))
            update(parameters, skip)

        optimizer.update = counting
        trainer.train()
        return most_units, most_bytes, sum(local_of(p).nbytes for p in optimizer.slots)


def unit_of(name, units):
    """The innermost unit that a parameter is in."""
    return max((unit for unit in units if name.startswith(f"{unit}." if unit else "")), key=len)


def test_at_most_one_units_gradients_are_alive(ranks, tmp_path):
    for units, size, everything in ranks(gradients_alive, 2, tmp_path / "early", True):
        assert units == 1
        assert 0 < size < everything / 2
    for units, size, everything in ranks(gradients_alive, 2, tmp_path / "plain", False):
        assert units == 4  # two blocks, embedding and head: the count can fail
        assert size >= everything


def bad_gradient_on_one_rank(folder):
    with running(configure(folder, AdamW.Config(), 4, early=True)) as trainer:

        def spoiled(grad):
            if trainer.step == 1 and dist.get_rank() == 1 and grad.ndim == 1:
                grad.to_local().fill_(float("inf"))
            return local_and_axes(grad)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchtitan.optim.updates.local_and_axes", spoiled)
            with pytest.raises(NumericsError) as caught:
                trainer.train()
        policy = trainer.models["policy"]
        finite = all(p.to_local().isfinite().all() for p in policy.model.parameters())
        return str(caught.value), finite, trainer.checkpointer.latest()


def test_a_bad_gradient_on_one_rank_ends_the_run_on_all(ranks, tmp_path):
    for text, finite, latest in ranks(bad_gradient_on_one_rank, 2, tmp_path):
        assert "step 2: loss=" in text
        assert "nothing was saved from it" in text
        assert finite
        assert latest is None


def offloaded(in_backward):
    """Weights after three steps of an FSDP2 model whose parameters and gradients are in host memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    mesh = torch_api.init_device_mesh("cpu", (2,))
    policy = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    for layer in (model[0], model[2], model):
        torch_api.fully_shard(layer, mesh=mesh, offload_policy=policy)
    optimizer = AdamW.Config(lr=0.01, state_dtype="int8").build(model.named_parameters())
    updates = make_updates(optimizer, Clip(0.1, "parameter"), in_backward=in_backward)
    for _ in range(3):
        updates.begin(torch.zeros(()))
        model(torch.linspace(-1, 1, 4 * 64).view(4, 64)).square().sum().backward()
        updates.clip()
        updates.finish(torch.zeros(()))
        optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}


def test_in_the_backward_with_offloaded_parameters(ranks):
    for plain, early in zip(ranks(offloaded, 2, False), ranks(offloaded, 2, True), strict=True):
        for name, weight in plain.items():
            assert torch.equal(weight, early[name]), name


def random_bits(mesh_shape, placements):
    mesh = torch_api.init_device_mesh("cpu", mesh_shape)
    weight = torch_api.distribute_tensor(torch.zeros(7, 10), mesh, placements)
    bits = Noise("w", weight).bits(torch.tensor(5.0), slice(None))
    sharded = torch_api.DTensor.from_local(
        bits.view(weight.to_local().shape), mesh, placements, shape=weight.shape, stride=(10, 1)
    )
    return sharded.full_tensor()


def test_rounding_is_the_same_on_every_mesh(ranks):
    want = Noise("w", torch.zeros(7, 10)).bits(torch.tensor(5.0), slice(None))
    shard = torch_api.Shard
    for shape, placements in [
        ((2,), [shard(0)]),
        ((4,), [shard(1)]),
        ((2, 2), [shard(0), shard(1)]),
    ]:
        for found in ranks(random_bits, torch.Size(shape).numel(), shape, placements):
            assert torch.equal(found, want)
