"""Rules between the sections of a run's config."""

from tests.tiny import tiny
from torchtitan.config import check_tree
from torchtitan.models.qwen3.sizes import qwen3


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
