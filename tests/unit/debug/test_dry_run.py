"""What a dry run says is what a run does: bytes held, bytes sent, and the formulas of data parallelism."""

import re
import resource

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_expert_parallel import moe_model
from tests.tiny import rows, running, tiny, tiny_model
from tests.traffic import TrafficRecorder, stated
from torchtitan import train
from torchtitan.debug import dry_run
from torchtitan.debug.dry_run import PARALLELISMS, Plan, fake_ranks, plan
from torchtitan.models.layers.attention import GQA
from torchtitan.models.llama3.sizes import SIZES, llama3
from torchtitan.objectives.next_token import NextToken
from torchtitan.optim.optimizer import AdamW
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.parallel.compile import Compile
from torchtitan.parallel.context import ContextParallel
from torchtitan.parallel.fsdp_traffic import fsdp_traffic
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.traffic import Step
from torchtitan.training.feed import to_microbatches
from torchtitan.training.pipeline_engine import make_engine


def cut(model, mesh, pipeline, *, mode="none", dtype=torch.float32, reshard=True, meta=False):
    return parallelize(
        model,
        mesh,
        activation_checkpointing=ActivationCheckpointing.Config(mode=mode),
        compile=Compile.Config(),
        pipeline=pipeline,
        compute_dtype=dtype,
        reshard_after_forward=reshard,
        seed=0,
        meta=meta,
    )


def stated_and_measured(mesh_config, model_config, micro_batches, **options):
    """Traffic of a step as the parallelisms state it, and as it is seen, on this rank of the process group."""
    mesh = mesh_config.build(torch.device("cpu"))
    model = cut(model_config, mesh, mesh_config.pipeline, **options)
    whole = rows(2, 32, model_config.vocab_size)
    whole["labels"] = whole["tokens"]  # all count: so is the loss stated
    (batch,) = to_microbatches(whole, 2, mesh)
    engine = make_engine(model, NextToken.Config().build(), mesh)
    totals = engine.totals([batch])
    engine.forward_backward([batch] * micro_batches, totals)  # a pipeline's first step connects
    with TrafficRecorder() as recorder:
        engine.forward_backward([batch] * micro_batches, totals)
    dtype = options.get("dtype", torch.float32)
    step = Step(micro_batches, 2, 32, dtype.itemsize)
    said = stated(row for parallelism in PARALLELISMS for row in parallelism(model, mesh, step))
    return said, {key: list(value) for key, value in recorder.seen.items()}


@pytest.mark.parametrize(
    ("world_size", "mesh", "micro_batches", "options"),
    [
        (8, Mesh.Config(), 1, {}),
        (8, Mesh.Config(dp_replicate=2), 2, {}),
        (8, Mesh.Config(dp_replicate=8), 2, {}),
        (6, Mesh.Config(dp_replicate=2, reshard_after_forward=False), 2, {"reshard": False}),
        (4, Mesh.Config(), 2, {"mode": "full"}),
        (4, Mesh.Config(), 1, {"dtype": torch.bfloat16, "mode": "selective"}),
        (1, Mesh.Config(), 1, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_stated_traffic_is_what_is_sent(world_size, mesh, micro_batches, options, tied):
    model = tiny_model(tied=tied, vocab_size=4099)  # does not divide: padding travels too
    with fake_ranks(world_size, rank=world_size - 1):
        said, seen = stated_and_measured(mesh, model, micro_batches, **options)
    assert said == seen
    assert bool(seen) is (world_size > 1)


PIPELINES = [  # (ranks, pp, micro-batches, settings)
    (2, 2, 4, {"schedule": "GPipe"}),
    (2, 2, 4, {"schedule": "1F1B"}),
    (4, 2, 4, {"schedule": "1F1B"}),
    (4, 2, 4, {"schedule": "Interleaved1F1B"}),
    (4, 2, 4, {"schedule": "LoopedBFS", "stages_per_rank": 4}),
    (4, 2, 4, {"schedule": "InterleavedZeroBubble"}),
    (4, 2, 4, {"schedule": "ZBVZeroBubble"}),
    (4, 2, 4, {"schedule": "DualPipeV"}),
]


@pytest.mark.parametrize(("world_size", "pp", "micro_batches", "settings"), PIPELINES, ids=str)
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stated_traffic_is_what_a_pipeline_sends(
    ranks, world_size, pp, micro_batches, settings, tied
):
    mesh = Mesh.Config(pp=pp, pipeline=Pipeline.Config(**settings))
    model = tiny_model(tied=tied, n_layers=8)
    for said, seen in ranks(stated_and_measured, world_size, mesh, model, micro_batches):
        assert said == seen
        assert ("send", 2) in seen


def test_stated_traffic_is_what_gloo_sends(ranks):
    for said, seen in ranks(stated_and_measured, 4, Mesh.Config(dp_replicate=2), tiny_model(), 2):
        assert said == seen
        assert set(seen) == {("all_gather", 2), ("reduce_scatter", 2), ("all_reduce", 2)}


def plan_of(
    model, mesh, world_size, *, rank=0, dtype=torch.bfloat16, micro_batches=1, in_backward=False
) -> Plan:
    return plan(
        rank=rank,
        world_size=world_size,
        mesh=mesh,
        cut_model=lambda built: cut(model, built, mesh.pipeline, dtype=dtype, meta=True),
        build_optimizer=lambda built: AdamW.Config().build(
            built.named_parameters(), built.names_elsewhere()
        ),
        step=Step(micro_batches, 1, 8192, dtype.itemsize),
        compute=str(dtype),
        in_backward=in_backward,
    )


def resident_mib():
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_fsdp_sends_what_the_formula_says():
    """P * (2 + 2 + 4) * (N - 1) / N, less the second gather of what stays gathered: last block, head, final norm."""
    n = 8
    before = resident_mib()
    found = plan_of(llama3("8b"), Mesh.Config(), n)
    assert (
        resident_mib() - before < 500
    )  # and not the 16 GiB of a shard with its gradients and state
    with torch.device("meta"):
        model = llama3("8b").build()
    p = sum(parameter.numel() for parameter in model.parameters())
    assert p == 8_030_261_248
    kept = sum(
        q.numel() for m in (model.layers[-1], model.head, model.norm) for q in m.parameters()
    )
    sent = sum(row.sent_bytes for row in found.traffic)
    assert sent == (p * (2 + 2 + 4) - 2 * kept) * (n - 1) / n
    calls = {
        op: sum(r.calls for r in found.traffic if r.operation == op)
        for op in ("all_gather", "reduce_scatter")
    }
    units = SIZES["8b"].n_layers + 3
    assert calls == {"all_gather": 2 * units - 3, "reduce_scatter": units}
    assert found.memory == {
        "parameters": 4 * p // n,
        "gradients": 4 * p // n,
        "optimizer state": 8 * p // n + 4 * len(list(model.parameters())),  # and a step count each
    }


def test_hsdp_sends_its_shard_twice_over_the_replicas():
    """Inside as FSDP; across, an all-reduce of the float32 shard: 2 * (P / N) * 4 * (R - 1) / R."""
    found = plan_of(llama3("debug"), Mesh.Config(dp_replicate=2), 8, micro_batches=3)
    p = sum(h.local_bytes for h in found.holdings)  # float32, one shard
    across = sum(row.sent_bytes for row in found.traffic if row.axis == "dp_replicate")
    assert across == 2 * p * (2 - 1) / 2


@pytest.mark.slow
def test_405b_on_512_ranks_takes_no_memory():
    before = resident_mib()
    found = plan_of(llama3("405b"), Mesh.Config(dp_replicate=4), 512, rank=511)
    assert resident_mib() - before < 500
    assert sum(h.count for h in found.holdings) == 9 * 126 + 3
    total = sum(h.count * torch.Size(h.shape).numel() for h in found.holdings)
    assert total == 405_853_388_800
    q_proj = next(h for h in found.holdings if h.pattern == "layers.*.attention.q_proj.weight")
    assert (q_proj.count, q_proj.shape, q_proj.local_shape) == (126, (16384, 16384), (128, 16384))
    assert q_proj.placement == "dp_replicate=Replicate fsdp=Shard(0)"
    assert q_proj.local_bytes == 126 * 128 * 16384 * 4
    assert re.search(r"layers\.\*\.attention\.q_proj\.weight +126  \(16384, 16384\)", str(found))
    assert not dist.is_initialized()


def bytes_held(folder):
    """Bytes of parameters, gradients and optimizer state on this rank after a backward."""
    trainer = tiny(folder).build()
    policy = trainer.models["policy"]
    batch = rows(2, 32, trainer.config.model.vocab_size)
    policy.engine.forward_backward([batch], policy.engine.totals([batch]))
    local = [p.to_local() for p in policy.model.parameters()]
    grads = [p.grad.to_local() for p in policy.model.parameters()]
    state = [
        t.to_local() if hasattr(t, "to_local") else t
        for t in policy.optimizer.state_tensors().values()
    ]
    return [sum(t.nbytes for t in tensors) for tensors in (local, grads, state)]


def test_stated_memory_is_what_each_rank_holds(ranks, tmp_path):
    real = ranks(bytes_held, 4, tmp_path)
    for rank in range(4):
        found = plan_of(tiny_model(), Mesh.Config(), 4, rank=rank)
        assert list(found.memory.values()) == real[rank]


def bytes_of_live_gradients(folder, **training):
    """Most bytes of the storages of gradients at any update of a step with updates in the backward."""
    config = tiny(folder, steps=1, clip_by="parameter", **training)
    config.optimizer.in_backward = True
    with running(config) as trainer:
        optimizer = trainer.models["policy"].optimizer
        update, most = optimizer.update, 0

        def counting(parameters, skip):
            nonlocal most
            grads = [p.grad for p in optimizer.slots if p.grad is not None]
            local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
            storages = {g.untyped_storage().data_ptr(): g.untyped_storage() for g in local}
            most = max(most, sum(storage.nbytes() for storage in storages.values()))
            update(parameters, skip)

        optimizer.update = counting
        trainer.train()
    return most


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.bfloat16, "unit"), (torch.float32, "parameter")]
)
def test_updates_in_the_backward_leave_one_units_gradients(dtype, largest, tmp_path):
    """In float32 one rank goes without FSDP, and each parameter is on its own."""
    found = plan_of(tiny_model(), Mesh.Config(), 1, dtype=dtype, in_backward=True)
    stated = found.memory[f"gradients of the largest {largest}"]
    assert stated == bytes_of_live_gradients(tmp_path, compute_dtype=str(dtype)[6:])
    everything = plan_of(tiny_model(), Mesh.Config(), 1, dtype=dtype).memory["gradients"]
    assert stated == 4096 * 16 * 4 < everything


def test_a_unit_of_several_parameters_counts_as_a_whole():
    model = tiny_model(vocab_size=64)  # a block is larger than the embedding
    found = plan_of(model, Mesh.Config(), 2, in_backward=True)
    block = sum(h.local_bytes for h in found.holdings if h.pattern.startswith("layers.")) // 2
    assert found.memory["gradients of the largest unit"] == block


def test_a_pipeline_is_drawn_and_its_copies_are_counted():
    mesh = Mesh.Config(pp=2)
    first, last = (
        plan_of(tiny_model(tied=True), mesh, 4, rank=rank, micro_batches=3) for rank in (0, 2)
    )
    assert "rank 0 | 0F0 0F1 .   .   0B0 --  0F2 0B1 --  .   0B2 --" in str(first)
    assert first.holdings[0].pattern == "embedding.weight"
    assert last.holdings[-1].pattern == "head.weight (copy)"
    assert [row.what for row in first.traffic][:2] == [
        "hidden states",
        "embedding.weight to its copy",
    ]
    assert last.memory["parameters"] == sum(h.local_bytes for h in last.holdings)
    assert first.uncounted == []


def test_what_is_not_counted_is_said(monkeypatch):
    monkeypatch.setattr(dry_run, "PARALLELISMS", (fsdp_traffic,))
    found = plan_of(tiny_model(), Mesh.Config(pp=2, dp_shard=2), 4, micro_batches=2)
    assert found.uncounted == ["pp"]
    assert "\n\nnot counted: what goes over pp\n\n" in str(found)


def test_a_second_process_group_is_refused():
    with fake_ranks(2, 0), pytest.raises(RuntimeError, match="a process group exists already"):
        plan_of(tiny_model(), Mesh.Config(), 2)
    assert not dist.is_initialized()


def test_the_recipe_is_described_from_the_command_line(capsys):
    assert train.main(["--dry-run-rank", "5", "--ngpu", "8", "--training.device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "rank 5 of 8 ranks: dp_shard=8 on cpu; computes in torch.float32" in out
    assert "(training.compute_dtype=auto on cpu)" in out
    row = next(line for line in out.splitlines() if "all_gather" in line and "blocks" in line)
    assert row.split() == [
        "fsdp",
        "8",
        "all_gather",
        "parameters",
        "of",
        "blocks",
        "4",
        "11.26",
        "MiB",
        "9.85",
        "MiB",
    ]
    assert not dist.is_initialized()


def test_updates_in_the_backward_show_on_the_command_line(capsys):
    early = ["--optimizer.in-backward", "True", "--training.clip-by", "parameter"]
    assert train.main(["--dry-run", "--ngpu", "8", "--training.device", "cpu", *early]) == 0
    assert re.search(r"gradients of the largest unit +512.00 KiB", capsys.readouterr().out)


def test_a_rank_that_is_none_is_refused(capsys):
    assert train.main(["--dry-run-rank", "8", "--ngpu", "8", "--training.device", "cpu"]) == 2
    text = capsys.readouterr().err
    assert "--dry-run-rank=8: is not one of the 8 ranks; write 0 to 7" in text
    assert train.main(["--dry-run-rank", "x"]) == 2
    assert (
        "--dry-run-rank=x: is not a rank; write --dry-run-rank 0 or more" in capsys.readouterr().err
    )


CONTEXTS = [  # (ranks, mesh, options)
    (2, {"cp": 2}, {}),
    (4, {"cp": 4, "tp": 1}, {"mode": "full"}),
    (4, {"cp": 2, "dp_shard": 2}, {"dtype": torch.bfloat16, "mode": "selective"}),
    (4, {"cp": 2, "tp": 2}, {}),
    (4, {"cp": 2, "pp": 2}, {}),
]


@pytest.mark.parametrize("kind", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize(
    ("world_size", "degrees", "options"),
    [
        pytest.param(*context, marks=[] if context[0] == 2 else pytest.mark.slow)
        for context in CONTEXTS
    ],
    ids=str,
)
def test_stated_traffic_is_what_context_parallel_sends(ranks, world_size, degrees, options, kind):
    mesh = Mesh.Config(**{"dp_shard": 1, **degrees}, context=ContextParallel.Config(kind=kind))
    heads = GQA.Config(n_heads=8, n_kv_heads=4)
    model = tiny_model(n_layers=4, dim=32, attention=heads)
    for said, seen in ranks(stated_and_measured_of, world_size, mesh, model, 2, options):
        assert said == seen


def stated_and_measured_of(mesh, model, micro_batches, options):
    return stated_and_measured(mesh, model, micro_batches, **options)


EXPERTS = [  # (ranks, mesh, options)
    (2, {"dp_shard": 2, "ep": 2}, {}),
    (4, {"dp_shard": 4, "ep": 2}, {"mode": "full"}),
    (4, {"dp_shard": 2, "tp": 2, "ep": 4}, {}),
    (4, {"cp": 2, "dp_shard": 2, "ep": 4}, {"mode": "selective"}),
    (4, {"pp": 2, "dp_shard": 2, "ep": 2}, {}),
]


@pytest.mark.parametrize(("world_size", "degrees", "options"), EXPERTS, ids=str)
def test_stated_traffic_is_what_experts_get_on_average(ranks, world_size, degrees, options):
    model = moe_model(scope=None, n_layers=4, attention=GQA.Config(n_heads=4, n_kv_heads=2))
    mesh = Mesh.Config(**{"dp_shard": 1, **degrees})
    found = ranks(stated_and_measured_of, world_size, mesh, model, 2, options)
    for key in set().union(*(said.keys() | seen.keys() for said, seen in found)):
        said = sum(said.get(key, [0, 0])[1] for said, _ in found)
        seen = sum(seen.get(key, [0, 0])[1] for _, seen in found)
        assert (key, said) == (key, seen)
