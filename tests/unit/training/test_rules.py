"""Rules between the sections of a run's config."""

import pytest
import torch

from tests.tiny import tiny
from torchtitan.config import check_tree
from torchtitan.models.layers.attention import GQA
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.param_groups import ParamGroup
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


def test_blocks_that_tensor_parallel_cuts_are_found_by_the_check(tmp_path):
    config = tiny(tmp_path)
    config.model.dim = 64
    config.model.attention = GQA.Config(n_heads=2, n_kv_heads=2)
    config.model.feed_forward.ffn_dim = 96
    config.optimizer = AdamW.Config(state_dtype="int8")
    config.parallelism.tp = 2
    config.training.global_batch_rows = 0
    assert problems(config, 2) == [
        "training.global_batch_rows=0: is not positive; set at least 1",
        "optimizer.state_dtype=int8: keeps blocks of 32 or 64 elements, and parallelism.tp=2 cuts them in "
        "layers.*.attention.out_proj.weight (64 columns), layers.*.feed_forward.down_proj.weight (96 columns); "
        "set optimizer.block_size=16 or optimizer.state_dtype=bfloat16",
    ]
    config.training.global_batch_rows = 8
    config.optimizer.block_size = 16  # the remedy
    assert problems(config, 2) == []
    config.model.feed_forward.ffn_dim = 80 * 2 + 16  # 88 columns a rank
    (text,) = problems(config, 2)
    assert text.endswith("down_proj.weight (176 columns); set optimizer.state_dtype=bfloat16")
    config.parallelism.tp = 1
    assert problems(config) == []


def test_a_pattern_that_matches_no_parameter_is_found_by_the_check(tmp_path):
    config = tiny(tmp_path)
    config.optimizer.param_groups = [
        ParamGroup.Config(pattern="layers.0.*"),
        ParamGroup.Config(pattern="layers.8.*"),
    ]
    assert problems(config) == [
        "optimizer.param_groups.1.pattern=layers.8.*: matches none of the 21 trainable parameters; "
        "write one over names such as embedding.weight, layers.0.attention_norm.weight, layers.0.attention.q_proj.weight"
    ]


def test_a_vocabulary_smaller_than_the_tokenizer_is_found_by_the_check(tmp_path):
    config = tiny(tmp_path)
    config.model.vocab_size = 4095
    config.training.steps = 0
    assert problems(config) == [
        "model.vocab_size=4095: is less than the tokenizer's 4096 entries; set model.vocab_size to at least 4096",
        "training.steps=0: is not positive; set at least 1",
    ]
    config.tokenizer.path = str(tmp_path / "tokenizer.json")
    assert f"tokenizer.path={tmp_path}/tokenizer.json: does not exist" in problems(config)[0]
