"""Qwen3 in Hugging Face folders: dense, and with experts."""

from torchtitan.models.decoder_family import DecoderFamily

FAMILIES = (
    DecoderFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        window="switch",
        head_dim=128,
        constants={"attention_bias": False},
    ),
    DecoderFamily(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=True,
        window="switch",
        constants={"attention_bias": False, "decoder_sparse_step": 1},
    ),
)
