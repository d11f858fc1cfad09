"""Rotary position embedding."""

# Shapes: B batch, S sequence, H heads, Dh head dim.

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.models.layers.rope_scaling import RoPEScaling


class RoPE(Configurable):
    """Angles of the rotary embedding (arXiv:2104.09864).

    Feature ``i`` is paired with ``i + Dh/2`` (the layout of Hugging Face checkpoints), not with its neighbour.
    The tables are computed from the positions of each batch: no buffer to keep, move or rebuild.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `RoPE`."""

        theta: float = 500_000.0
        """Base of the geometric series of wavelengths."""
        scaling: RoPEScaling.Config | None = None
        """Frequency scaling; None for none."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.theta <= 1:
                yield Problem("theta", self.theta, "is not above 1", "set one such as 500000")

        def build(self, head_dim: int) -> "RoPE":
            """Make the tables' maker for heads of ``head_dim`` features."""
            return RoPE(self, head_dim)

    def __init__(self, config: Config, head_dim: int) -> None:
        self.config = config
        self.head_dim = head_dim

    def frequencies(self, device: torch.device) -> Tensor:
        """Angular frequencies in radians per token, float32, ``(Dh/2,)``."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        frequencies = 1.0 / self.config.theta**exponents
        scaling = self.config.scaling
        return scaling.scale(frequencies, self.config.theta) if scaling else frequencies

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each position's angles, times the scaling's magnitude: ``(B, S) -> 2 x (B, S, 1, Dh)``, float32."""
        angles = positions[..., None].float() * self.frequencies(positions.device)  # (B, S, Dh/2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # (B, S, 1, Dh)
        scaling = self.config.scaling
        magnitude = scaling.magnitude() if scaling else 1.0
        if magnitude == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * magnitude, angles.sin() * magnitude


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of features by its position's angle: ``(B, S, H, Dh) -> (B, S, H, Dh)``.

    Computed in float32, returned in the type of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)  # (B, S, H, Dh/2)
    turned = torch.cat((-second, first), dim=-1)  # (B, S, H, Dh)
    return (x.float() * cos + turned * sin).type_as(x)
