"""Mistral in Hugging Face folders."""

from torchtitan.models.decoder_family import DecoderFamily

FAMILIES = (DecoderFamily(model_type="mistral", architecture="MistralForCausalLM", window="size"),)
