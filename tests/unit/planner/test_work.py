"""FLOPs, bytes and bounds of a step, against numbers worked out by hand and what the cut model says it sends."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import running
from tests.unit.planner.cases import MOE, small
from torchtitan.debug.dry_run import fake_ranks, traffic_of
from torchtitan.parallel.degrees import Degrees
from torchtitan.parallel.traffic import Step, Traffic
from torchtitan.planner.devices import Device, find_device
from torchtitan.planner.work import bounds_of, work_of
from torchtitan.trainer import cut_model
from torchtitan.training.feed import to_microbatches
from torchtitan_recipes.models.llama3 import llama3_70b


def seventy_billion(**mesh):
    config = llama3_70b()
    config.training.global_batch_rows = 8 // mesh.get("tp", 1)
    config.parallelism.tp = 1
    config.activation_checkpointing.mode = "none"
    for name, degree in mesh.items():
        setattr(config.parallelism, name, degree)
    return config


def test_70b_computes_and_moves_what_was_worked_out_by_hand():
    work = work_of(seventy_billion(), 8)
    assert work.flops == pytest.approx(449e9 * 8192, rel=2e-3)
    assert work.update_bytes == pytest.approx(28 * 70.553706496e9 / 8, rel=1e-5)
    # Gathered twice in bf16 and reduced once in float32; the last block and the head are gathered once.
    assert sum(work.sent_bytes.values()) == pytest.approx(494e9, rel=0.01)
    bounds = bounds_of(work, find_device("H100-80GB"))
    assert bounds is not None
    assert bounds.update_s == pytest.approx(0.0737, rel=2e-3)
    assert bounds.compute_s == pytest.approx(449e9 * 8192 / 989.5e12, rel=2e-3)
    assert bounds.step_s == max(bounds.compute_s, bounds.communication_s) + bounds.update_s
    assert bounds.step_exposed_s == pytest.approx(bounds.step_s + bounds.communication_s)


def counted_flops(config):
    """Of the matmuls of a real step; the counter does not know attention on a CPU."""
    with running(config) as trainer:
        rows = trainer.loader.next().batch
        batches = to_microbatches(rows, trainer.micro_batch_rows, trainer.mesh)
        with FlopCounterMode(display=False) as counter:
            trainer.train_step([{**batch, "document_ids": None} for batch in batches])
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("mode", "every_n_matmuls"), [("full", 1), ("selective", 1), ("selective", 2), ("selective", 0)]
)
def test_recomputed_flops_are_those_of_a_real_step(mode, every_n_matmuls, tmp_path):
    def config(recompute):
        made = small(recompute=recompute, model={"n_layers": 2}, micro_batch_rows=4)
        made.training.seq_len, made.folder = 32, str(tmp_path)
        made.activation_checkpointing.save_every_n_matmuls = every_n_matmuls
        return made

    scores = 2 * 2 * (2 * 128 * 32 / 2) * 8 * 32  # layers; keys and values; causal; tokens
    expected = counted_flops(config(mode)) - counted_flops(config("none"))
    planned = work_of(config(mode), 1).recomputed_flops
    assert planned == expected + scores * (mode == "full")


def test_recomputation_leaves_out_the_last_matmul_and_unchosen_blocks():
    config = seventy_billion()
    config.activation_checkpointing.mode = "full"
    work = work_of(config, 8)
    forward = (work.flops - 6 * 128256 * 8192 * 8192) / 3
    whole = forward - 80 * 2 * 8192 * 28672 * 8192
    assert work.recomputed_flops == pytest.approx(whole)
    config.activation_checkpointing.every_n_blocks = 2
    assert work_of(config, 8).recomputed_flops == pytest.approx(whole / 2)


def test_tensor_parallel_of_70b_sends_75_gb():
    sent = work_of(seventy_billion(tp=8), 8).sent_bytes
    assert sent["tensor parallel"] == pytest.approx(75e9, rel=0.02)


MESHES = {
    "fsdp": (4, {}),
    "fsdp, parameters stay": (4, {"reshard": False}),
    "hsdp": (4, {"mesh": {"dp_replicate": 2}}),
    "tp": (4, {"mesh": {"tp": 2}, "recompute": "selective"}),
    "cp": (4, {"mesh": {"cp": 2}, "recompute": "full"}),
    "1F1B": (4, {"mesh": {"pp": 2}, "micro_batch_rows": 1}),
    "Interleaved1F1B": (4, {"mesh": {"pp": 2}, "micro_batch_rows": 1}),
    "ep": (4, {"mesh": {"ep": 2}, "model": MOE, "recompute": "full"}),
}


@pytest.mark.parametrize("name", MESHES)
def test_bytes_are_those_that_the_cut_model_sends(name):
    ranks, changes = MESHES[name]
    config = small(compute_dtype="bfloat16", **changes)
    if name == "Interleaved1F1B":
        config.parallelism.pipeline.schedule = name
    with fake_ranks(ranks, 0):
        mesh = config.parallelism.build(torch.device("cpu"))
        model = cut_model(config, mesh, torch.bfloat16, meta=True)
        rows = changes.get("micro_batch_rows", 8 // mesh.dp_world_size)
        step = Step(8 // mesh.dp_world_size // rows, rows, 256, 2)
        expected = traffic_of(model, mesh, step)
    work = work_of(config, ranks)
    assert list(work.traffic) == expected
    assert sum(work.sent_bytes.values()) == sum(row.sent_bytes for row in expected)


def bounds_over(row, degrees, **rates):
    work = replace(work_of(small(), 1), traffic=[row], degrees=degrees)
    device = Device("?", 1, peak_tflops=1.0, memory_tb_per_s=1.0, link_gb_per_s=400.0)
    bounds = bounds_of(work, device, **rates)
    assert bounds is not None
    return bounds


def test_what_stays_in_a_machine_goes_over_its_links():
    """2 machines of 8: tp inside of them, FSDP over both with one rank or four of each."""
    size = 16 * 10**9
    degrees = Degrees(dp_shard=2, tp=8)
    inside = bounds_over(Traffic("tp", 8, "all_gather", "x", 1, size), degrees)
    assert (inside.link_s, inside.network_s) == (size * 7 / 8 / 400e9, 0)
    across = bounds_over(Traffic("fsdp", 2, "all_gather", "x", 1, size), degrees)
    assert (across.link_s, across.network_s) == (0, size / 2 / 50e9)
    four = bounds_over(
        Traffic("fsdp", 8, "reduce_scatter", "x", 1, size), Degrees(dp_shard=8, tp=2)
    )
    assert four.link_s == pytest.approx(size * 3 / 8 / 400e9)
    assert four.network_s == pytest.approx(size * 4 / 8 / (4 * 50e9))  # by four adapters
    experts = bounds_over(
        Traffic("ep", 16, "all_to_all", "x", 1, size), Degrees(dp_shard=16, ep=16)
    )
    assert experts.network_s == pytest.approx(size * 8 / 16 / 50e9)  # each by its own
    assert experts.communication_s == experts.link_s + experts.network_s
    one_each = bounds_over(
        Traffic("tp", 8, "all_gather", "x", 1, size), Degrees(tp=8), node_ranks=1
    )
    assert one_each.network_s == pytest.approx(size * 7 / 8 / 50e9)


def test_a_device_without_rates_has_no_bounds():
    assert bounds_of(work_of(small(), 1), Device("24GiB", 24 * 2**30)) is None
