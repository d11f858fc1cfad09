"""One matmul for each group of rows, each group with its own matrix."""

# Shapes: N rows, sorted by group; E groups; D_in, D_out features.

import torch
from torch import Tensor

from torchtitan import torch_api

ALIGNMENT = 8
"""Both feature dims of `grouped_matmul` are multiples of this: 16 bytes in the narrowest type, 2 bytes an element."""


def grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``rows[group e] @ weight[e].T`` for all groups in one kernel, without telling the host how large they are.

    Args:
        rows: ``(N, D_in)``, the rows of group 0 first.
        weight: ``(E, D_out, D_in)``.
        counts: ``(E,)`` int64, rows of each group; they sum to N.

    Returns:
        ``(N, D_out)``.

    Raises:
        ValueError: if a feature dim is not a multiple of `ALIGNMENT`.
    """
    for features in weight.shape[1:]:
        if features % ALIGNMENT:
            raise ValueError(
                f"weight {tuple(weight.shape)} has {features} features, which is not a multiple of {ALIGNMENT}; "
                "pad it, or use loop_matmul"
            )
    offsets = counts.cumsum(0, dtype=torch.int32)  # (E,)
    return torch_api.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)


def loop_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same as `grouped_matmul`, one ordinary matmul after the other: the reference, for any number of features.

    Args:
        rows: ``(N, D_in)``, the rows of group 0 first.
        weight: ``(E, D_out, D_in)``.
        counts: ``(E,)`` int64, rows of each group; they sum to N.

    Returns:
        ``(N, D_out)``.
    """
    parts = rows.split(counts.tolist())  # sync
    return torch.cat(
        [part @ matrix.t() for part, matrix in zip(parts, weight.unbind(), strict=True)]
    )
