"""Qwen2 and Qwen2.5 in Hugging Face folders."""

from torchtitan.models.decoder_family import DecoderFamily

FAMILIES = (
    DecoderFamily(
        model_type="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True, window="switch"
    ),
)
