import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.batch import IGNORE_INDEX
from torchtitan.ops.linear_cross_entropy import linear_cross_entropy


def case(tokens, dim=8, vocab=13, masked=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=g).requires_grad_()
    weight = torch.randn(vocab, dim, generator=g).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < masked] = IGNORE_INDEX
    return hidden, weight, labels


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(0, 40),
    chunk=st.integers(1, 50),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_equals_the_dense_computation(tokens, chunk, masked, seed):
    hidden, weight, labels = case(tokens, masked=masked, seed=seed)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    dense = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(loss, dense, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(loss * 0.5, (hidden, weight))
    want = torch.autograd.grad(dense * 0.5, (hidden, weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_all_masked_is_zero_with_zero_gradients():
    hidden, weight, labels = case(6, masked=1.0)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_masked_tokens_states_and_a_larger_vocabulary_never_matter():
    hidden, weight, labels = case(6)
    labels[2] = IGNORE_INDEX
    with torch.no_grad():
        before = linear_cross_entropy(hidden, weight, labels)
        hidden[2] = 1e6
        assert torch.equal(before, linear_cross_entropy(hidden, weight, labels))


def test_backward_can_run_twice_and_frozen_sides_are_skipped():
    hidden, weight, labels = case(9)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = linear_cross_entropy(hidden, weight.detach(), labels)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], first[0])
    loss = linear_cross_entropy(hidden.detach(), weight, labels)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], first[1])


def test_bfloat16_gradients_come_back_in_bfloat16():
    hidden, weight, labels = case(32)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    loss = linear_cross_entropy(*low, labels)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, low)
    assert {g.dtype for g in grads} == {torch.bfloat16}
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    for a, b in zip(grads, want, strict=True):
        assert (a.float() - b).norm() / b.norm() < 0.02  # bf16 keeps 2 to 3 digits


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, labels = case(6)
    with pytest.raises(ValueError, match=r"hidden_states \(6, 8\) and labels \(5,\) do not fit"):
        linear_cross_entropy(hidden, weight, labels[:5])
    with pytest.raises(ValueError, match=r"weight \(13, 7\) has another width"):
        linear_cross_entropy(hidden, weight[:, :7], labels)
