import pytest
import torch

from torchtitan.models.llama3.sizes import SIZES, llama3


def on_meta(name):
    with torch.device("meta"):
        return llama3(name).build()


@pytest.mark.parametrize(
    ("name", "total", "matmul"),
    [
        ("3b", 3_212_749_824, 3_212_574_720),
        ("8b", 8_030_261_248, 7_504_658_432),
        ("70b", 70_553_706_496, 69_501_714_432),
        ("405b", 405_853_388_800, 403_747_897_344),
    ],
)
def test_parameter_counts_are_those_of_the_public_models(name, total, matmul):
    counts = on_meta(name).parameter_counts()
    assert counts.total == total
    assert counts.matmul == matmul


def test_1b_counts():
    counts = on_meta("1b").parameter_counts()
    assert counts.total == 1_235_814_400
    assert counts.embedding == 128_256 * 2048


@pytest.mark.parametrize(
    ("name", "seq_len", "causal", "full"),
    [
        ("3b", 4096, 21.4e9, 23.5e9),
        ("8b", 8192, 51.5e9, 57.9e9),
        ("70b", 8192, 449e9, 481e9),
        ("405b", 8192, 2524e9, 2625e9),
    ],
)
def test_flops_per_token_matches_the_published_figures(name, seq_len, causal, full):
    model = on_meta(name)
    assert model.flops_per_token(seq_len) == pytest.approx(causal, rel=2e-3)
    assert model.flops_per_token(seq_len, causal=False) == pytest.approx(full, rel=2e-3)


@pytest.mark.parametrize("name", SIZES)
def test_flops_per_token_is_the_closed_form(name):
    size = SIZES[name]
    model = on_meta(name)
    head_dim = size.dim // size.n_heads
    scores = 6 * size.n_layers * size.n_heads * (head_dim + head_dim) * 1000
    assert model.flops_per_token(1000, causal=False) == 6 * model.parameter_counts().matmul + scores
    assert model.flops_per_token(1000) == 6 * model.parameter_counts().matmul + scores / 2


@pytest.mark.parametrize("name", SIZES)
def test_tied_sizes_share_the_table(name):
    model = on_meta(name)
    assert (model.head.weight is model.embedding.weight) == (name in ("1b", "3b"))
