"""FLOPs, bytes and bounds of a step, against numbers worked out by hand and what the cut model says it sends."""

import pytest
import torch

from tests.unit.planner.cases import small
from torchtitan.debug.dry_run import fake_ranks
from torchtitan.parallel.fsdp_traffic import fsdp_traffic
from torchtitan.parallel.traffic import Step
from torchtitan.planner.devices import Device, find_device
from torchtitan.planner.work import Work, bounds_of, work_of
from torchtitan.trainer import cut_model
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


def test_recomputation_is_a_forward_of_the_blocks():
    config = seventy_billion()
    config.activation_checkpointing.mode = "full"
    work = work_of(config, 8)
    assert work.recomputed_flops == pytest.approx((work.flops - 6 * 128256 * 8192 * 8192) / 3)


def test_tensor_parallel_of_70b_sends_75_gb():
    sent = work_of(seventy_billion(tp=8), 8).sent_bytes
    assert sent["tensor parallel"] == pytest.approx(75e9, rel=0.02)


@pytest.mark.parametrize("reshard", [True, False])
def test_bytes_are_those_that_the_cut_model_sends(reshard):
    config = small(compute_dtype="bfloat16", reshard=reshard)
    with fake_ranks(4, 0):
        mesh = config.parallelism.build(torch.device("cpu"))
        model = cut_model(config, mesh, torch.bfloat16, meta=True)
        rows = list(fsdp_traffic(model, mesh, Step(1, 2, 256, 2)))
    sent = work_of(config, 4).sent_bytes
    assert sum(sent.values()) == sum(row.sent_bytes for row in rows)


def test_a_device_without_rates_has_no_bounds():
    assert bounds_of(work_of(small(), 1), Device("24GiB", 24 * 2**30)) is None
