import pytest
import torch

from tests.heads import case
from torchtitan.ops.linear_distillation import linear_distillation
from torchtitan.ops.token_log_probs import token_log_probs


def test_the_backward_can_run_again_and_frozen_sides_get_nothing():
    hidden, weight, labels = case(9)
    found = token_log_probs(hidden, weight, labels, chunk_tokens=4)
    total = found.log_probs.sum() - 0.1 * found.entropies.sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    log_probs, _ = token_log_probs(hidden, weight.detach(), labels)
    assert torch.autograd.grad(log_probs.sum(), hidden)[0].any()
    with torch.no_grad():
        assert not token_log_probs(hidden, weight, labels).log_probs.requires_grad


def test_tokens_that_do_not_count_are_zero():
    hidden, weight, labels = case(9, masked=1.0)
    found = token_log_probs(hidden, weight, labels)
    assert not found.log_probs.any()
    assert not found.entropies.any()
    (found.log_probs.sum() + found.entropies.sum()).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_uniform_distribution_has_the_entropy_ln_v():
    hidden, weight, labels = case(5, vocab=16, masked=0.0)
    found = token_log_probs(torch.zeros_like(hidden), weight, labels)
    assert found.entropies.tolist() == pytest.approx([2.7725887] * 5)
    assert found.log_probs.tolist() == pytest.approx([-2.7725887] * 5)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(divergence):
    hidden, weight, labels = case(9)
    loss = linear_distillation(
        hidden, weight, hidden.detach(), weight.detach(), labels, divergence=divergence
    )
    assert loss.item() == pytest.approx(0, abs=1e-5)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert all(grad.abs().max() < 1e-5 for grad in grads)


def test_another_vocabulary_is_refused():
    hidden, weight, labels = case(6)
    with pytest.raises(ValueError, match=r"teacher's weight has 12 entries .* the student's 13"):
        linear_distillation(hidden, weight, hidden, weight[:12], labels)
