"""Activation checkpointing and compiled blocks under FSDP2 compute what neither computes."""

import pytest
import torch

from tests.tiny import full, rows, tiny, tiny_model, train
from torchtitan.optim.clipping import global_grad_norm
from torchtitan.parallel import activation_checkpointing
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.parallel.compile import Compile

NONE = ActivationCheckpointing.Config()
FULL = ActivationCheckpointing.Config(mode="full")


def steps(folder, recompute, compile_config, tied, *, n_steps=2, replicate=1):
    """Losses and norms of some steps over uneven rows in two micro-batches, and the first step's gradients."""
    config = tiny(folder, micro_batch_rows=2)
    config.model = tiny_model(tied=tied, vocab_size=4099)
    config.activation_checkpointing, config.compile = recompute, compile_config
    config.parallelism.dp_replicate = replicate
    trainer = config.build()
    policy, mesh = trainer.models["policy"], trainer.mesh
    local = 8 // mesh.dp_world_size
    losses, norms, grads = [], [], {}
    for seed in range(n_steps):
        batch = rows(8, 32, 4099, seed)
        own = {k: v[mesh.dp_rank * local : (mesh.dp_rank + 1) * local] for k, v in batch.items()}
        micro = [{k: v[i : i + 2] for k, v in own.items()} for i in range(0, local, 2)]
        losses.append(
            policy.engine.forward_backward(micro, policy.engine.totals(micro)).total.item()
        )
        norms.append(global_grad_norm(policy.model.parameters()).item())
        grads = grads or {name: full(p.grad) for name, p in policy.model.named_parameters()}
        policy.optimizer.step(torch.zeros(()))
        policy.optimizer.zero_grad()
    return losses, norms, grads


def assert_same(found, want, tolerance=1e-5):
    assert found[0] == pytest.approx(want[0], rel=1e-6)
    assert found[1] == pytest.approx(want[1], rel=tolerance)
    assert list(found[2]) == list(want[2])
    for name, grad in found[2].items():
        assert (grad - want[2][name]).norm() / want[2][name].norm() < tolerance, name


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def alone(request, rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    off = Compile.Config()
    return request.param, rank_pool.run(steps, 1, folder, NONE, off, request.param)[0]


@pytest.mark.parametrize(
    "recompute",
    [
        FULL,
        ActivationCheckpointing.Config(mode="full", every_n_blocks=2),
        ActivationCheckpointing.Config(mode="selective"),
    ],
    ids=["full", "every second", "selective"],
)
@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (4, 2)])
def test_recomputation_under_fsdp(ranks, tmp_path, alone, recompute, world_size, replicate):
    tied, want = alone
    args = (tmp_path, recompute, Compile.Config(), tied)
    for found in ranks(steps_replicated, world_size, *args, replicate):
        assert_same(found, want)


def steps_replicated(folder, recompute, compile_config, tied, replicate):
    return steps(folder, recompute, compile_config, tied, replicate=replicate)


def compiled_steps(folder, recompute):
    """With inductor, within the time that compilation may take; its own warnings are not ours."""
    return steps(folder, recompute, Compile.Config(enabled=True), False, n_steps=3)


@pytest.mark.parametrize("recompute", [NONE, FULL], ids=["keep", "recompute"])
def test_compiled_blocks_under_fsdp(ranks, tmp_path, recompute):
    (want,) = ranks(eager_steps, 1, tmp_path / "alone")
    for found in ranks(compiled_steps, 2, tmp_path, recompute, timeout_s=300.0):
        assert found[0] == pytest.approx(want[0], rel=1e-5)
        assert_same(found, want)


def eager_steps(folder):
    return steps(folder, NONE, Compile.Config(), False, n_steps=3)


def with_a_fault(folder):
    """A recomputation that forgets its rotation: the comparison has to notice it."""
    with pytest.MonkeyPatch.context() as patch:
        kept = activation_checkpointing.checkpoint

        def forgetful(function, hidden_states, rope, mask, **options):
            calls = []

            def run(hidden_states, rope, mask):
                calls.append(None)
                turned = rope if len(calls) == 1 else (torch.ones_like(rope[0]), rope[1] * 0)
                return function(hidden_states, turned, mask)

            return kept(run, hidden_states, rope, mask, **options)

        patch.setattr(activation_checkpointing, "checkpoint", forgetful)
        return steps(folder, FULL, Compile.Config(), False)


def test_the_comparison_notices_a_fault(ranks, tmp_path, alone):
    tied, want = alone
    if tied:
        pytest.skip("once is enough")
    for found in ranks(with_a_fault, 2, tmp_path):
        with pytest.raises(AssertionError):
            assert_same(found, want)


def run(folder, recompute, compile_config, parallelism, pipeline):
    """Losses of a whole run over packed documents, and the final weights that this rank has."""
    config = tiny(folder, steps=4, micro_batch_rows=2)
    config.model = tiny_model(n_layers=4)
    config.activation_checkpointing, config.compile = recompute, compile_config
    for name, degree in parallelism.items():
        setattr(config.parallelism, name, degree)
    for name, value in pipeline.items():
        setattr(config.parallelism.pipeline, name, value)
    return train(config)


@pytest.fixture(scope="module")
def run_alone(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return rank_pool.run(run, 1, folder, NONE, Compile.Config(), {}, {})[0]


SPREAD = [  # (ranks, parallelism, pipeline)
    (2, {"cp": 2}, {}),
    (4, {"cp": 2, "dp_shard": 2}, {}),
    (2, {"pp": 2}, {"schedule": "1F1B"}),
    (2, {"pp": 2}, {"schedule": "Interleaved1F1B"}),
    (2, {"pp": 2}, {"schedule": "ZBVZeroBubble"}),
    (4, {"pp": 2, "dp_shard": 2}, {"schedule": "InterleavedZeroBubble"}),
]


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        pytest.param("full", None, marks=pytest.mark.slow),
        pytest.param("selective", None, marks=pytest.mark.slow),  # both are in the parity grid
        ("none", "aot_eager"),
        pytest.param("full", "aot_eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("world_size", "parallelism", "pipeline"), SPREAD, ids=str)
def test_they_compose_with_the_other_axes(
    ranks, tmp_path, run_alone, world_size, parallelism, pipeline, mode, backend
):
    if mode == "selective" and "Zero" in pipeline.get("schedule", ""):
        pytest.skip("refused: see tests/unit/parallel/test_activation_checkpointing.py")
    recompute = ActivationCheckpointing.Config(mode=mode)
    compile_config = Compile.Config(enabled=backend is not None, backend=backend or "inductor")
    want_losses, want_weights = run_alone
    args = (tmp_path, recompute, compile_config, parallelism, pipeline)
    for losses, weights in ranks(run, world_size, *args, timeout_s=240.0):
        assert losses == pytest.approx(want_losses, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, want_weights[name], rtol=0, atol=2e-3)
