import pytest
import torch

from torchtitan.models.layers.attention import SDPA
from torchtitan.models.layers.mask import Mask


def reference(q, k, v, allowed):
    """Attention written out: float64 softmax over the allowed keys."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double()).float()


def qkv(batch, seq):
    torch.manual_seed(0)
    shapes = ((batch, seq, 4, 8), (batch, seq, 2, 8), (batch, seq, 2, 8))
    return [torch.randn(s, requires_grad=True) for s in shapes]


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]])


@pytest.mark.parametrize("ids", [None, IDS, torch.zeros(2, 10, dtype=torch.int64)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_equals_attention_written_out(ids, window, causal):
    q, k, v = qkv(2, 10)
    mask = Mask(ids, causal=causal).windowed(window)
    allowed = torch.zeros(2, 1, 10, 10, dtype=torch.bool)
    for b in range(2):
        for i in range(10):
            for j in range(10):
                near = window is None or abs(i - j) < window
                same = ids is None or ids[b, i] == ids[b, j]
                allowed[b, 0, i, j] = near and same and (j <= i or not causal)
    expected = reference(q, k, v, allowed)
    out = SDPA()(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_dense_mask_used_on_a_gpu_equals_the_cpu_path():
    mask = Mask(IDS)
    q, k, v = qkv(2, 10)
    torch.testing.assert_close(
        SDPA()(q, k, v, mask), reference(q, k, v, mask.dense(10, torch.device("cpu")))
    )


def test_document_lengths():
    assert Mask(IDS).document_lengths == [3, 4, 3, 9, 1]
    assert Mask(torch.zeros(3, 7)).document_lengths is None
    assert Mask().document_lengths is None
