"""Frequency scalings of the rotary embedding, for contexts longer than those trained on."""

# Shapes: Dh head dim.

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.config.configurable import Configurable, Problem


class RoPEScaling(Configurable):
    """A change of the angular frequencies, and of the length of queries and keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What every kind has; fields are named as in Hugging Face's ``rope_scaling``."""

        factor: float = 8.0
        """How much longer the context gets."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.factor < 1:
                yield Problem("factor", self.factor, "is below 1", "set 1 for no scaling")

        @abstractmethod
        def scale(self, frequencies: Tensor, theta: float) -> Tensor:
            """Scale angular frequencies, radians per token: ``(Dh/2,) -> (Dh/2,)``.

            Args:
                frequencies: in falling order, a geometric series.
                theta: its base: frequency i is ``theta ** (-2 i / Dh)``.
            """

        def magnitude(self) -> float:
            """Factor on cosines and sines, so on queries and keys."""
            return 1.0


class LinearScaling(RoPEScaling):
    """Position interpolation: every frequency is divided by `factor` (arXiv:2306.15595)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPEScaling.Config):
        """Settings of `LinearScaling`."""

        def scale(self, frequencies: Tensor, theta: float) -> Tensor:
            """See `RoPEScaling.Config.scale`."""
            del theta
            return frequencies / self.factor


class Llama3Scaling(RoPEScaling):
    """Stretch of the low frequencies alone (Llama 3.1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPEScaling.Config):
        """Settings of `Llama3Scaling`; low frequencies are divided by `factor`."""

        low_freq_factor: float = 1.0
        """Wavelengths above `original_context` / this are divided by `factor`."""
        high_freq_factor: float = 4.0
        """Wavelengths below `original_context` / this stay as they are; between the two, a linear blend."""
        original_context: int = 8192
        """Sequence length of the pretraining, in tokens."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            yield from RoPEScaling.Config.check(self)
            if self.low_freq_factor >= self.high_freq_factor:
                yield Problem(
                    "low_freq_factor",
                    self.low_freq_factor,
                    f"is not below high_freq_factor={self.high_freq_factor}",
                    "set a smaller one",
                )

        def scale(self, frequencies: Tensor, theta: float) -> Tensor:
            """See `RoPEScaling.Config.scale`."""
            del theta
            wavelengths = 2 * math.pi / frequencies
            turns = self.original_context / wavelengths
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = blend.clamp(0.0, 1.0)
            return (1 - blend) * frequencies / self.factor + blend * frequencies


class YarnScaling(RoPEScaling):
    """YaRN (arXiv:2309.00071): frequencies with few turns in the context are interpolated, the others stay.

    The blend is linear in the *index* of the frequency, as in the public implementations (section 3.2 of the paper has
    it linear in the number of turns). Queries and keys grow by ``0.1 ln(factor) + 1`` in all (equation 22).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoPEScaling.Config):
        """Settings of `YarnScaling`."""

        original_context: int
        """Sequence length of the pretraining, in tokens."""
        beta_fast: float = 32.0
        """Frequencies that turn more often than this in the original context stay as they are."""
        beta_slow: float = 1.0
        """Frequencies that turn less often than this are divided by `factor`."""
        attention_factor: float | None = None
        """Factor on queries and keys; None means 0.1 ln(factor) + 1."""
        truncate: bool = True
        """Round the ends of the blend to whole indices."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            yield from RoPEScaling.Config.check(self)
            if self.original_context < 1:
                yield Problem(
                    "original_context", self.original_context, "is not positive", "set tokens"
                )
            if not 0 < self.beta_slow < self.beta_fast:
                yield Problem(
                    "beta_slow",
                    self.beta_slow,
                    f"is not between 0 and beta_fast={self.beta_fast}",
                    "set a smaller one, such as 1",
                )

        def scale(self, frequencies: Tensor, theta: float) -> Tensor:
            """See `RoPEScaling.Config.scale`."""
            n = len(frequencies)
            decay = math.log(theta) / n  # of the logarithm, from one frequency to the next
            first, last = (
                math.log(self.original_context / (beta * 2 * math.pi)) / decay
                for beta in (self.beta_fast, self.beta_slow)
            )  # indices of the frequencies with beta turns in the original context
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * n - 1)
            index = torch.arange(n, dtype=torch.float32, device=frequencies.device)
            blend = ((index - first) / max(last - first, 0.001)).clamp(
                0, 1
            )  # (Dh/2,), 1: stretched
            return blend * frequencies / self.factor + (1 - blend) * frequencies

        def magnitude(self) -> float:
            """See `RoPEScaling.Config.magnitude`."""
            if self.attention_factor is not None:
                return self.attention_factor
            return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
