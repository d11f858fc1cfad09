"""What the rows of all families' tables of sizes have in common."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """The shape of a decoder; a family's own row adds what differs between its sizes.

    Attributes:
        dim: width of the residual stream.
        n_layers: blocks.
        n_heads: query heads.
        n_kv_heads: key/value heads.
        ffn_dim: width of the feed-forward layer, or of one expert.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
