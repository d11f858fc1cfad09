"""A part of attention, with each kernel, against attention written out."""

import pytest
import torch

from torchtitan.ops import attention_block
from torchtitan.ops.attention_block import Band, block_backward, block_forward, merge

BANDS = [
    None,
    Band(0, causal=True, window=None),
    Band(9, causal=True, window=12),
    Band(0, causal=False, window=11),
]


def written_out(q, k, v, allowed):
    """Output and log-sum-exp in float64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def make(n_queries, n_keys, dv=8, dtype=torch.float32, kv_heads=2):
    torch.manual_seed(0)
    shapes = [(2, n_queries, 4, 8), (2, n_keys, kv_heads, 8), (2, n_keys, kv_heads, dv)]
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.fixture(params=["fused", "plain"])
def kernel(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(attention_block, "QUERIES_AT_ONCE", 3)
        monkeypatch.setattr(attention_block, "_choose", lambda *args: ("plain", False, None))
    return request.param


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_two_parts_merge_to_the_whole(kernel, band, kv_heads):
    """Keys in two parts, forward and backward."""
    q, k, v = make(10, 10, kv_heads=kv_heads)
    allowed = band.dense(10, 10, q.device) if band else torch.ones(10, 10, dtype=torch.bool)
    want, want_lse = written_out(q, k, v, allowed)
    parts = [slice(0, 5), slice(5, 10)] if band is None else [slice(0, 10)]
    out, lse = torch.zeros(2, 10, 4, 8), torch.full((2, 4, 10), float("-inf"))
    with torch.no_grad():
        for part in parts:
            merge(out, lse, *block_forward(q, k[:, part], v[:, part], band))
    torch.testing.assert_close(out, want.float())
    torch.testing.assert_close(lse, want_lse.float())
    grad = torch.randn_like(out)
    want_grads = torch.autograd.grad((want * grad).sum(), (q, k, v))
    with torch.no_grad():
        got = [block_backward(grad, q, k[:, p], v[:, p], out, lse, band) for p in parts]
    torch.testing.assert_close(sum(g[0] for g in got), want_grads[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for g in got], 1), want_grads[i])


def test_values_may_have_another_width():
    q, k, v = make(6, 7, dv=4)
    out, lse = block_forward(q, k, v)
    want, want_lse = written_out(q, k, v, torch.ones(6, 7, dtype=torch.bool))
    torch.testing.assert_close(out, want.float())
    torch.testing.assert_close(lse, want_lse.float())
    grad = torch.randn_like(out)
    want_grads = torch.autograd.grad((want * grad).sum(), (q, k, v))
    for got, expected in zip(block_backward(grad, q, k, v, out, lse), want_grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_bfloat16_stays_close():
    q, k, v = make(6, 6, dtype=torch.bfloat16)
    out, lse = block_forward(q, k, v, Band(0, causal=True, window=None))
    want, _ = written_out(q, k, v, torch.ones(6, 6).tril().bool())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("band", BANDS)
def test_on_a_gpu(band, dtype):
    """Each kernel that is chosen there, against float64."""
    q, k, v = (t.detach().cuda().requires_grad_() for t in make(10, 10, dtype=dtype))
    allowed = band.dense(10, 10, q.device) if band else torch.ones(10, 10, device="cuda").bool()
    want, want_lse = written_out(q, k, v, allowed)
    tolerance = (
        {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    )
    out, lse = block_forward(q, k, v, band)
    torch.testing.assert_close(out.double(), want, **tolerance)
    torch.testing.assert_close(lse.double(), want_lse, **tolerance)
    grad = torch.randn_like(out)
    want_grads = torch.autograd.grad((want * grad).sum(), (q, k, v))
    got = block_backward(grad, q, k, v, out, lse, band)
    for a, b in zip(got, want_grads, strict=True):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)
