import math

import torch

from torchtitan.models.layers.rope import RoPE, apply_rope
from torchtitan.models.layers.rope_scaling import Llama3Scaling


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    rope = RoPE.Config(theta=10_000.0).build(16)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i, j):
        a = apply_rope(q, *rope(torch.tensor([[i]])))
        b = apply_rope(k, *rope(torch.tensor([[j]])))
        return (a * b).sum()

    torch.testing.assert_close(score(5, 3), score(105, 103))
    assert not torch.allclose(score(5, 3), score(5, 4))


def test_pairs_are_rotated_by_position_times_frequency():
    rope = RoPE.Config(theta=100.0).build(4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    out = apply_rope(x, *rope(torch.tensor([[7]]))).flatten()
    for i, frequency in enumerate((1.0, 0.1)):
        turned = complex(x.flatten()[i], x.flatten()[i + 2]) * complex(
            math.cos(7 * frequency), math.sin(7 * frequency)
        )
        torch.testing.assert_close(out[i].item(), turned.real, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[i + 2].item(), turned.imag, rtol=1e-5, atol=1e-5)


def test_llama3_scaling_leaves_high_frequencies_and_divides_low_ones():
    scaling = Llama3Scaling.Config(factor=8.0, original_context=8192)
    wavelengths = torch.tensor([10.0, 2000.0, 8192.0 / 2.5, 9000.0, 1e6])
    frequencies = 2 * math.pi / wavelengths
    scaled = scaling.scale(frequencies, 500_000.0)
    torch.testing.assert_close(scaled[:2], frequencies[:2])
    torch.testing.assert_close(scaled[3:], frequencies[3:] / 8)
    blend = (2.5 - 1) / (4 - 1)
    torch.testing.assert_close(scaled[2], (1 - blend) * frequencies[2] / 8 + blend * frequencies[2])


def test_scaling_checks():
    problems = list(Llama3Scaling.Config(factor=0.5, low_freq_factor=4.0).check())
    assert [p.path for p in problems] == ["factor", "low_freq_factor"]
    assert "is not below high_freq_factor=4.0" in problems[1].reason
    (problem,) = RoPE.Config(theta=1.0).check()
    assert "is not above 1" in problem.reason
