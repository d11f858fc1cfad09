import pytest

from tests.families import settings
from tests.tiny import tiny_model
from torchtitan.errors import ConfigError
from torchtitan.models.family import find_family
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.layers.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from torchtitan.models.layers.router import Router

LLAMA31 = {  # as the public files of transformers 4 have it
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "use_cache": True,
}  # fmt: skip


def hf(**changes):
    found = {**settings(), "rms_norm_eps": 1e-6, **changes}
    return {key: value for key, value in found.items() if value is not ...}


def problem(model_type, **changes):
    with pytest.raises(ConfigError) as error:
        find_family(model_type).from_hf(hf(**changes))
    return str(error.value)


def test_rope_is_read_in_the_old_and_the_new_spelling():
    family = find_family("llama")
    old = family.from_hf(hf(**LLAMA31, rope_parameters=...))
    new = family.from_hf(hf(rope_parameters={"rope_theta": 5e5, **LLAMA31["rope_scaling"]}))
    assert old.rope == new.rope == RoPE.Config(theta=5e5, scaling=Llama3Scaling.Config(factor=8.0))
    older = family.from_hf(hf(rope_parameters=..., rope_scaling={"type": "linear", "factor": 2.0}))
    assert older.rope == RoPE.Config(theta=1e4, scaling=LinearScaling.Config(factor=2.0))


def test_yarn_takes_from_the_context_what_is_not_stated():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    config = find_family("qwen2").from_hf(hf(rope_parameters=rope))
    assert config.rope.scaling == YarnScaling.Config(factor=4.0, original_context=16)


def test_everything_wrong_is_listed_at_once():
    text = problem(
        "llama",
        hidden_size=...,
        vocab_size="97",
        hidden_act="gelu",
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0},
        quantization_config={"quant_method": "fp8"},
    )
    assert "hidden_size=None: is missing; add it" in text
    assert "vocab_size=97: is not a positive whole number" in text
    assert "hidden_act=gelu: is not supported; only 'silu' is" in text
    assert "attention_bias=True: is not supported; only False is" in text
    assert "rope_type='dynamic' is not supported; it must be one of ['linear', 'llama3', 'yarn']" in text  # fmt: skip
    assert "quantised weights are not read; dequantise the folder first" in text


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]: are not the first layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: is not supported; only 1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "leaves some layers without a window"),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['full_attention', 'sliding_attention']: leaves some layers without a window"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks ['original_max_position_embeddings']"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "has settings that linear has not: ['beta']"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: is not supported; only 1.0 is"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "turn a part of the features only"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps=x: is not a number"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(model_type, changes, message):
    extra = {"num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2} if "moe" in model_type else {}  # fmt: skip
    assert message in problem(model_type, **extra, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
        ("qwen3_moe", {"use_sliding_window": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 9}),
    ],
)  # fmt: skip
def test_the_window_is_what_transformers_makes_of_the_same_config(model_type, changes):
    transformers = pytest.importorskip("transformers")
    extra = {"num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2} if "moe" in model_type else {}  # fmt: skip
    theirs = transformers.AutoConfig.for_model(model_type, **hf(**extra, **changes))
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"]
    want = theirs.sliding_window if kinds[0] == "sliding_attention" else None
    found = find_family(model_type).from_hf(hf(**extra, **changes))
    assert found.attention.window == want


def test_keys_that_nobody_knows_are_told(caplog):
    find_family("llama").from_hf(hf(clever_trick=True))
    assert "keys that are not known here and were ignored: clever_trick=True" in caplog.text


def test_a_model_without_words_in_the_format_is_refused():
    family = find_family("llama")
    config = tiny_model(norm=RMSNorm.Config(eps=1e-6))
    config.attention.qk_norm = RMSNorm.Config()
    config.attention.window = 7
    with pytest.raises(ConfigError, match="has no words for this model") as error:
        family.to_hf(config)
    assert "model.attention.window=7: it would be read as None" in str(error.value)
    assert "model.attention.qk_norm=" in str(error.value)
    moe = MoE.Config(n_experts=4, ffn_dim=8, router=Router.Config(top_k=2))
    with pytest.raises(ConfigError, match="a llama model has no such layer"):
        family.to_hf(tiny_model(feed_forward=moe))
    moe.router.scale = 2.5
    with pytest.raises(ConfigError, match=r"router\.scale=2\.5: it would be read as 1\.0"):
        find_family("qwen3_moe").to_hf(
            tiny_model(feed_forward=moe, attention=find_family("qwen3").from_hf(hf()).attention)
        )
