import pytest
import torch

from torchtitan.ops.grouped_matmul import grouped_matmul, loop_matmul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 9], [0, 0, 0, 0]], ids=str)
def test_grouped_equals_loop(dtype, counts):
    generator = torch.Generator().manual_seed(0)
    n = sum(counts)
    rows, weight, upstream = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((n, 16), (4, 24, 16), (n, 24))
    )
    results = []
    for matmul in (grouped_matmul, loop_matmul):
        inputs = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = matmul(*inputs, torch.tensor(counts))
        results.append([out, *torch.autograd.grad((out * upstream).sum(), inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    for group, count in enumerate(counts):
        if count == 0:
            assert results[0][2][group].eq(0).all()


def test_an_odd_width_is_refused_with_its_number():
    with pytest.raises(
        ValueError, match=r"\(4, 24, 20\) has 20 features, which is not a multiple of 8"
    ):
        grouped_matmul(torch.zeros(1, 20), torch.zeros(4, 24, 20), torch.tensor([1, 0, 0, 0]))
