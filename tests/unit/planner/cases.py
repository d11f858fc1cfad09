"""Runs of a small model whose memory the planner must know."""

from tests.tiny import tiny, tiny_model
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.head import Head
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.router import Router


def small(
    *,
    model=None,
    recompute="none",
    reshard=True,
    in_backward=False,
    state_dtype="float32",
    optimizer=None,
    mesh=None,
    **training,
):
    """A run of four layers of width 128, rows of 256 tokens."""
    config = tiny("unused", seq_len=256, **{"global_batch_rows": 8, **training})
    config.model = tiny_model(
        **{
            "dim": 128,
            "n_layers": 4,
            "attention": GQA.Config(n_heads=4, n_kv_heads=2),
            "feed_forward": SwiGLU.Config(ffn_dim=384),
            **(model or {}),
        }
    )
    config.optimizer = optimizer or config.optimizer
    config.activation_checkpointing.mode = recompute
    config.parallelism.reshard_after_forward = reshard
    config.optimizer.state_dtype = state_dtype
    config.optimizer.in_backward = in_backward
    if in_backward:
        config.training.max_grad_norm = None
    for name, value in (mesh or {}).items():
        setattr(config.parallelism, name, value)
    return config


MOE = {"feed_forward": MoE.Config(n_experts=8, ffn_dim=128, router=Router.Config(top_k=2))}
QK_NORM = {"attention": GQA.Config(n_heads=4, n_kv_heads=2, qk_norm=RMSNorm.Config())}
SMALL_CHUNKS = {"head": Head.Config(chunk_tokens=128)}
