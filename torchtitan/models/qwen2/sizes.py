"""The sizes of Qwen2.5 (arXiv:2412.15115), as rows of one table."""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.size import DecoderSize


@dataclass(frozen=True, slots=True)
class Size(DecoderSize):
    """One row.

    Attributes:
        tied: the head uses the embedding's weight.
        vocab_size: rows of the embedding.
        context_length: tokens that it is made for.
    """

    tied: bool = False
    vocab_size: int = 152_064
    context_length: int = 131_072


SIZES: dict[str, Size] = {
    "debug": Size(256, 4, 4, 2, 704, True, 4096, 2048),
    "0.5b": Size(896, 24, 14, 2, 4864, True, 151_936, 32_768),
    "1.5b": Size(1536, 28, 12, 2, 8960, True, 151_936),
    "3b": Size(2048, 36, 16, 2, 11008, True, 151_936, 32_768),
    "7b": Size(3584, 28, 28, 4, 18944),
    "14b": Size(5120, 48, 40, 8, 13824),
    "32b": Size(5120, 64, 40, 8, 27648),
    "72b": Size(8192, 80, 64, 8, 29568),
}


def qwen2(name: str) -> Decoder.Config:
    """The model of a row of `SIZES`; queries, keys and values have biases."""
    size = SIZES[name]
    return Decoder.Config(
        vocab_size=size.vocab_size,
        dim=size.dim,
        n_layers=size.n_layers,
        attention=GQA.Config(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads, qkv_bias=True),
        feed_forward=SwiGLU.Config(ffn_dim=size.ffn_dim),
        norm=RMSNorm.Config(eps=1e-6),
        rope=RoPE.Config(theta=1e6),
        tied=size.tied,
        hf_model_type="qwen2",
        context_length=size.context_length,
    )
