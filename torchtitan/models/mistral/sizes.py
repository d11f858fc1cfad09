"""The sizes of Mistral (arXiv:2310.06825), as rows of one table."""

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
        vocab_size: rows of the embedding.
        context_length: tokens that it is made for.
        theta: of the position embedding.
        head_dim: features of a head.
        window: keys that a query sees; None for all.
    """

    vocab_size: int
    context_length: int
    theta: float = 1e6
    head_dim: int = 128
    window: int | None = None


SIZES: dict[str, Size] = {
    "debug": Size(256, 4, 4, 2, 704, 4096, 2048, head_dim=64, window=64),
    "7b_v0.1": Size(4096, 32, 32, 8, 14336, 32_000, 32_768, theta=1e4, window=4096),
    "7b": Size(4096, 32, 32, 8, 14336, 32_768, 32_768),
    "nemo": Size(5120, 40, 32, 8, 14336, 131_072, 131_072),
}


def mistral(name: str) -> Decoder.Config:
    """The model of a row of `SIZES`: 7b is v0.3, nemo the 12B of 2407."""
    size = SIZES[name]
    return Decoder.Config(
        vocab_size=size.vocab_size,
        dim=size.dim,
        n_layers=size.n_layers,
        attention=GQA.Config(
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            head_dim=size.head_dim,
            window=size.window,
        ),
        feed_forward=SwiGLU.Config(ffn_dim=size.ffn_dim),
        rope=RoPE.Config(theta=size.theta),
        hf_model_type="mistral",
        context_length=size.context_length,
    )
