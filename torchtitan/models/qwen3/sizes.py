"""The sizes of Qwen3 (arXiv:2505.09388), dense and with experts, as rows of one table."""

from dataclasses import dataclass

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import FeedForward, SwiGLU
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.layers.router import Router
from torchtitan.models.size import DecoderSize

VOCAB_SIZE = 151_936


@dataclass(frozen=True, slots=True)
class Size(DecoderSize):
    """One row.

    Attributes:
        head_dim: features of a head.
        n_experts: experts of a layer; 0 for a dense model.
        top_k: experts of a token.
        theta: of the position embedding.
        tied: the head uses the embedding's weight.
        vocab_size: rows of the embedding.
    """

    head_dim: int = 128
    n_experts: int = 0
    top_k: int = 0
    theta: float = 1e6
    tied: bool = False
    vocab_size: int = VOCAB_SIZE


SIZES: dict[str, Size] = {
    "debug": Size(256, 4, 4, 2, 704, head_dim=64, tied=True, vocab_size=4096),
    "0.6b": Size(1024, 28, 16, 8, 3072, tied=True),
    "1.7b": Size(2048, 28, 16, 8, 6144, tied=True),
    "4b": Size(2560, 36, 32, 8, 9728, tied=True),
    "8b": Size(4096, 36, 32, 8, 12288),
    "14b": Size(5120, 40, 40, 8, 17408),
    "32b": Size(5120, 64, 64, 8, 25600),
    "debug_moe": Size(256, 4, 4, 2, 192, head_dim=64, n_experts=16, top_k=4, vocab_size=4096),
    "30b_a3b": Size(2048, 48, 32, 4, 768, n_experts=128, top_k=8),
    "235b_a22b": Size(4096, 94, 64, 4, 1536, n_experts=128, top_k=8, theta=5e6),
}


def qwen3(name: str) -> Decoder.Config:
    """The model of a row of `SIZES`. Those with experts balance their load without a loss, by the router's bias."""
    size = SIZES[name]
    feed_forward: FeedForward.Config = SwiGLU.Config(ffn_dim=size.ffn_dim)
    if size.n_experts:
        feed_forward = MoE.Config(
            n_experts=size.n_experts,
            ffn_dim=size.ffn_dim,
            router=Router.Config(top_k=size.top_k, score="softmax", bias_rate=1e-3),
        )
    return Decoder.Config(
        vocab_size=size.vocab_size,
        dim=size.dim,
        n_layers=size.n_layers,
        attention=GQA.Config(
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            head_dim=size.head_dim,
            qk_norm=RMSNorm.Config(eps=1e-6),
        ),
        feed_forward=feed_forward,
        norm=RMSNorm.Config(eps=1e-6),
        rope=RoPE.Config(theta=size.theta),
        tied=size.tied,
        hf_model_type="qwen3_moe" if size.n_experts else "qwen3",
        context_length=40_960,
    )
