import pytest
import torch

from torchtitan.optim.rounding import Noise, stochastic_round

ALL = slice(None)


def bits(name, step, shape=(64, 64)):
    return Noise(name, torch.empty(shape)).bits(torch.tensor(float(step)), ALL)


def test_the_mean_is_kept_and_only_neighbours_are_taken():
    values = torch.full(
        (512, 512), 1.0 + 0.3 * 2**-7
    )  # three tenths of the way to the next bfloat16
    rounded = stochastic_round(values, bits("w", 1, values.shape)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = (rounded > 1).double().mean().item()
    assert share == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / values.numel()) ** 0.5)


def test_what_bfloat16_holds_stays_as_it_is():
    values = torch.tensor([[0.0, -0.0, 1.5, -3.0e38, float("inf"), -float("inf"), 1e-40]])
    values = values.bfloat16().float()
    for extreme in (0, 0xFFFF):
        kept = stochastic_round(values, torch.full(values.shape, extreme, dtype=torch.int32))
        assert torch.equal(kept.float(), values)


def test_bits_are_uniform_and_differ_by_step_name_and_place():
    first = bits("w", 1, (256, 256))
    assert first.min() >= 0
    assert first.max() < 1 << 16
    for bit in range(16):
        ones = (first >> bit & 1).double().mean().item()
        assert ones == pytest.approx(0.5, abs=4 * 0.5 / 256)
    assert torch.equal(first, bits("w", 1, (256, 256)))
    for other in (bits("w", 2, (256, 256)), bits("v", 1, (256, 256)), first.roll(1, 0), first.T):
        both = torch.stack((first.flatten(), other.flatten())).double()
        assert torch.corrcoef(both)[0, 1].abs() < 4 / 256


def test_rows_can_be_asked_for_in_pieces():
    noise, step = Noise("w", torch.empty(4, 6, 5)), torch.tensor(3.0)
    whole = noise.bits(step, ALL)
    assert whole.shape == (24, 5)
    assert torch.equal(
        torch.cat([noise.bits(step, slice(0, 7)), noise.bits(step, slice(7, 24))]), whole
    )
    assert Noise("b", torch.empty(7)).bits(step, ALL).shape == (1, 7)
    assert Noise("s", torch.empty(())).bits(step, ALL).shape == (1, 1)
