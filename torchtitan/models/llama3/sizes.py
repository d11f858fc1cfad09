"""The sizes of Llama 3 (arXiv:2407.21783), as rows of one table."""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.layers.rope_scaling import Llama3Scaling
from torchtitan.models.size import DecoderSize

VOCAB_SIZE = 128_256


@dataclass(frozen=True, slots=True)
class Size(DecoderSize):
    """One row.

    Attributes:
        rope_factor: stretch of the context (Llama 3.1: 8, Llama 3.2: 32); None for none.
        tied: the head uses the embedding's weight.
        vocab_size: rows of the embedding.
    """

    rope_factor: float | None
    tied: bool = False
    vocab_size: int = VOCAB_SIZE


SIZES: dict[str, Size] = {
    "debug": Size(256, 4, 4, 2, 704, None, vocab_size=4096),
    "1b": Size(2048, 16, 32, 8, 8192, 32.0, tied=True),
    "3b": Size(3072, 28, 24, 8, 8192, 32.0, tied=True),
    "8b": Size(4096, 32, 32, 8, 14336, 8.0),
    "70b": Size(8192, 80, 64, 8, 28672, 8.0),
    "405b": Size(16384, 126, 128, 8, 53248, 8.0),
}


def llama3(name: str) -> Decoder.Config:
    """The model of a row of `SIZES`: Llama 3.2 for 1b and 3b, 3.1 for 8b, 70b and 405b."""
    size = SIZES[name]
    scaling = Llama3Scaling.Config(factor=size.rope_factor) if size.rope_factor else None
    return Decoder.Config(
        vocab_size=size.vocab_size,
        dim=size.dim,
        n_layers=size.n_layers,
        attention=GQA.Config(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads),
        feed_forward=SwiGLU.Config(ffn_dim=size.ffn_dim),
        rope=RoPE.Config(theta=500_000.0, scaling=scaling),
        tied=size.tied,
        hf_model_type="llama",
        context_length=131_072 if size.rope_factor else 8192,
    )
