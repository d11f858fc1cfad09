"""Rules between the sections of a run's config."""

import pytest
import torch

from tests.tiny import tiny
from torchtitan.config import check_tree
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.planner.advice import advise
from torchtitan_recipes.models.llama3 import llama3_70b


def problems(config, world_size=1):
    return [str(problem) for problem in check_tree(config, world_size)]


def test_experts_are_no_part_of_one_graph(tmp_path):
    config = tiny(tmp_path)
    config.model = qwen3("debug_moe")
    config.compile.enabled = True
    (text,) = problems(config)
    assert "model.feed_forward=MoE.Config: is run as it is written" in text
    assert "set compile.fullgraph=False" in text
    config.compile.fullgraph = False
    assert problems(config) == []
    config.compile.enabled, config.compile.fullgraph = False, True
    assert problems(config) == []


def test_the_compiler_cannot_weigh_what_tensor_parallel_keeps(tmp_path):
    config = tiny(tmp_path)
    config.model.attention.n_kv_heads = 2
    config.compile.enabled = True
    config.activation_checkpointing.mode = "budget"
    assert problems(config) == []
    config.parallelism.tp = 2
    (text,) = problems(config, 2)
    assert (
        "activation_checkpointing.mode=budget: cannot weigh the DTensors of parallelism.tp=2"
        in text
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_what_needs_a_gpu_is_refused_where_it_runs_not_where_it_is_planned(tmp_path):
    config = tiny(tmp_path)
    config.training.device = "auto"
    config.optimizer.offload = True
    assert problems(config) == []
    assert [str(problem) for problem in config.check_machine()] == [
        "optimizer.offload=True: but this machine has no usable GPU, so it trains in host memory anyway; "
        "set optimizer.offload=False"
    ]
    config.training.device = "cuda"
    assert problems(config) == []
    assert [str(problem) for problem in config.check_machine()] == [
        "training.device=cuda: but this machine has no usable GPU; set auto or cpu"
    ]


def test_advice_offers_host_memory_for_the_optimizer():
    config = llama3_70b()
    config.folder = "unused"
    changes = advise(config, 8, 8 << 30)
    assert any("--optimizer.offload" in str(change.flags) for change in changes)
