import pytest
import torch

from tests.tiny import rows
from torchtitan.models.layers.attention import SDPA
from torchtitan.models.layers.mask import Mask
from torchtitan.ops.document_attention import OPERATOR, document_attention


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_eager_path_bit_by_bit(window, causal):
    torch.manual_seed(0)
    document_ids = rows(4, 64, 100)["document_ids"]
    inputs = [torch.randn(4, 64, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    want = SDPA()(*inputs, Mask(document_ids, causal=causal, window=window))
    given = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, inputs, given)
    found = document_attention(*inputs, document_ids, causal=causal, window=window)
    grads = torch.autograd.grad(found, inputs, given)
    assert torch.equal(found, want)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        assert torch.equal(grad, want_grad)


def test_what_it_tells_the_compiler_is_true():
    document_ids = rows(2, 8, 100)["document_ids"]
    inputs = [torch.randn(2, 8, heads, 4, requires_grad=True) for heads in (4, 2, 2)]
    torch.library.opcheck(OPERATOR, (*inputs, document_ids, True, None))
