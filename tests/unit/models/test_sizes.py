"""Parameter counts of the public models, and the config.json that they have."""

import pytest
import torch

from torchtitan.config import differences
from torchtitan.models.family import families, find_family
from torchtitan.models.llama3.sizes import SIZES as LLAMA3
from torchtitan.models.llama3.sizes import llama3
from torchtitan.models.mistral.sizes import SIZES as MISTRAL
from torchtitan.models.mistral.sizes import mistral
from torchtitan.models.qwen2.sizes import SIZES as QWEN2
from torchtitan.models.qwen2.sizes import qwen2
from torchtitan.models.qwen3.sizes import SIZES as QWEN3
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.models.smollm2.sizes import SIZES as SMOLLM2
from torchtitan.models.smollm2.sizes import smollm2

EVERY = [
    pytest.param(make, name, id=f"{make.__name__}-{name}")
    for make, sizes in (
        (llama3, LLAMA3),
        (mistral, MISTRAL),
        (qwen2, QWEN2),
        (qwen3, QWEN3),
        (smollm2, SMOLLM2),
    )
    for name in sizes
]


@pytest.mark.parametrize(
    ("make", "name", "total"),
    [
        (mistral, "7b_v0.1", 7_241_732_096),
        (mistral, "7b", 7_248_023_552),
        (mistral, "nemo", 12_247_782_400),
        (qwen2, "0.5b", 494_032_768),
        (qwen2, "1.5b", 1_543_714_304),
        (qwen2, "3b", 3_085_938_688),
        (qwen2, "7b", 7_615_616_512),
        (qwen2, "14b", 14_770_033_664),
        (qwen2, "32b", 32_763_876_352),
        (qwen2, "72b", 72_706_203_648),
        (smollm2, "135m", 134_515_008),
        (smollm2, "360m", 361_821_120),
        (smollm2, "1.7b", 1_711_376_384),
    ],
)
def test_parameter_counts_are_those_of_the_public_models(make, name, total):
    with torch.device("meta"):
        assert make(name).build().parameter_counts().total == total


@pytest.mark.parametrize(("make", "name"), EVERY)
def test_config_json_of_every_size_reads_back_as_the_same_model(make, name):
    config = make(name)
    family = find_family(config.hf_model_type)
    back = family.from_hf(family.to_hf(config))
    assert back.context_length == config.context_length
    changed = {d.path for d in differences(config, back) if d.changes_mathematics}
    assert changed <= {"attention.head_dim", "feed_forward.router.bias_rate"}
    assert back.attention.head_dim == config.attention.resolved_head_dim(config.dim)
    assert family.to_hf(back) == family.to_hf(config)


def test_families_are_found_in_their_folders():
    assert set(families()) == {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
    with pytest.raises(Exception, match=r"model_type='mistrall' is no family.*did you mean mistral\?"):  # fmt: skip
        find_family("mistrall")
