"""Llama 3, and everything else that says llama in Hugging Face folders."""

from torchtitan.models.decoder_family import DecoderFamily

FAMILIES = (
    DecoderFamily(
        model_type="llama",
        architecture="LlamaForCausalLM",
        constants={"attention_bias": False, "mlp_bias": False},
    ),
)
