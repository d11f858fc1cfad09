"""The sizes of SmolLM2 (arXiv:2502.02737), as rows of one table. The architecture is Llama's."""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.size import DecoderSize


@dataclass(frozen=True, slots=True)
class Size(DecoderSize):
    """One row.

    Attributes:
        theta: of the position embedding.
        vocab_size: rows of the embedding.
    """

    theta: float = 1e5
    vocab_size: int = 49_152


SIZES: dict[str, Size] = {
    "debug": Size(192, 4, 3, 1, 512, vocab_size=4096),
    "135m": Size(576, 30, 9, 3, 1536),
    "360m": Size(960, 32, 15, 5, 2560),
    "1.7b": Size(2048, 24, 32, 32, 8192, theta=1.3e5),
}


def smollm2(name: str) -> Decoder.Config:
    """The model of a row of `SIZES`; all are tied."""
    size = SIZES[name]
    return Decoder.Config(
        vocab_size=size.vocab_size,
        dim=size.dim,
        n_layers=size.n_layers,
        attention=GQA.Config(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads),
        feed_forward=SwiGLU.Config(ffn_dim=size.ffn_dim),
        rope=RoPE.Config(theta=size.theta),
        tied=True,
        hf_model_type="llama",
        context_length=8192,
    )
