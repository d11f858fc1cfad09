import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.heads import case, check_equal
from torchtitan.batch import IGNORE_INDEX
from torchtitan.ops.linear_cross_entropy import linear_cross_entropy

GRADIENTS = ["float32", "weight_dtype", "by_vocabulary"]


class Seen(TorchDispatchMode):
    """Counts matrix products, and remembers the largest result of any operation."""

    def __init__(self):
        super().__init__()
        self.products = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


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


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10**6))
def test_every_operation_of_the_head_equals_its_dense_computation(seed):
    check_equal(random.Random(seed))


@pytest.mark.parametrize("how", GRADIENTS)
def test_all_masked_is_zero_with_zero_gradients(how):
    hidden, weight, labels = case(6, masked=1.0)
    loss = linear_cross_entropy(
        hidden, weight, labels, weight_gradient=how, z_loss=0.1, label_smoothing=0.1
    )
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_masked_tokens_states_never_matter():
    hidden, weight, labels = case(6)
    labels[2] = IGNORE_INDEX
    with torch.no_grad():
        before = linear_cross_entropy(hidden, weight, labels)
        hidden[2] = torch.inf
        assert torch.equal(before, linear_cross_entropy(hidden, weight, labels))


@pytest.mark.parametrize("how", GRADIENTS)
def test_backward_can_run_twice_and_frozen_sides_are_skipped(how):
    hidden, weight, labels = case(9)
    options = {"chunk_tokens": 4, "weight_gradient": how}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = linear_cross_entropy(hidden, weight.detach(), labels, **options)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], first[0])
    loss = linear_cross_entropy(hidden.detach(), weight, labels, **options)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], first[1])


def products(hidden, weight, labels, how):
    with Seen() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=4, weight_gradient=how)
    return seen.products


@pytest.mark.parametrize("how", GRADIENTS)
def test_what_needs_no_gradient_costs_no_product(how):
    hidden, weight, labels = case(12, vocab=12, masked=0.0)
    forward, walks = 3, 2 if how == "by_vocabulary" else 1
    assert products(hidden, weight, labels, how) == forward * (walks + 2)
    assert products(hidden.detach(), weight, labels, how) == forward * (walks + 1)
    assert products(hidden, weight.detach(), labels, how) == forward * (walks + 1)
    assert products(hidden.detach(), weight.detach(), labels, how) == forward
    with torch.no_grad():
        assert products(hidden, weight, labels, how) == forward


@pytest.mark.parametrize("how", GRADIENTS)
def test_nothing_of_tokens_times_vocabulary_exists(how):
    hidden, weight, labels = case(64, dim=4, vocab=96, masked=0.0)
    with Seen() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=8, weight_gradient=how).backward()
    assert seen.largest == 8 * 96


def test_ignored_tokens_are_dropped_before_the_projection():
    hidden, weight, labels = case(64, dim=2, vocab=96, masked=0.0)
    labels[3:] = IGNORE_INDEX
    with Seen() as seen:
        linear_cross_entropy(hidden, weight.detach(), labels, chunk_tokens=64)
    assert seen.largest == 3 * 96


@pytest.mark.parametrize(
    ("how", "limit"), [("float32", 0.02), ("weight_dtype", 0.03), ("by_vocabulary", 0.02)]
)
def test_bfloat16_gradients_come_back_in_bfloat16(how, limit):
    hidden, weight, labels = case(64, vocab=9000)  # more rows than are added up at once
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    loss = linear_cross_entropy(*low, labels, chunk_tokens=8, weight_gradient=how)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, low)
    assert {g.dtype for g in grads} == {torch.bfloat16}
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    for a, b in zip(grads, want, strict=True):
        assert (a.float() - b).norm() / b.norm() < limit  # bf16 keeps 2 to 3 digits


def test_adding_up_in_float32_keeps_small_terms_that_bfloat16_loses():
    hidden = torch.ones(2000, 1).bfloat16()
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    labels = torch.zeros(2000, dtype=torch.int64)  # each token adds -0.5 and 0.5
    for how, want in (("float32", 1000), ("by_vocabulary", 1000), ("weight_dtype", 128)):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=1, weight_gradient=how)
        (grad,) = torch.autograd.grad(loss, weight)
        assert grad.flatten().tolist() == [-want, want]


def test_twice_differentiating_is_refused():
    hidden, weight, labels = case(6)
    loss = linear_cross_entropy(hidden, weight, labels)
    (grad,) = torch.autograd.grad(loss**2, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore")  # those of the compiler's own parts
@pytest.mark.slow
def test_it_can_be_compiled_inside_and_outside():
    hidden, weight, labels = case(30, vocab=64)
    options = {"chunk_tokens": 7, "softcap": 3.0, "z_loss": 0.01, "label_smoothing": 0.1}
    want = linear_cross_entropy(hidden, weight, labels, **options)
    want_grads = torch.autograd.grad(want, (hidden, weight))
    inside = linear_cross_entropy(hidden, weight, labels, fused=True, **options)

    @torch.compile(backend="aot_eager")
    def doubled(hidden, weight, labels):
        return linear_cross_entropy(hidden * 1.0, weight, labels, **options) * 1.0

    for got in (inside, doubled(hidden, weight, labels)):
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, (hidden, weight)), want_grads, strict=True):
            torch.testing.assert_close(a, b)


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, labels = case(6)
    with pytest.raises(ValueError, match=r"hidden_states \(6, 8\) and labels \(5,\) do not fit"):
        linear_cross_entropy(hidden, weight, labels[:5])
    with pytest.raises(ValueError, match=r"weight \(13, 7\) has another width"):
        linear_cross_entropy(hidden, weight[:, :7], labels)
