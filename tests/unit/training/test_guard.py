import pytest
import torch

from torchtitan.errors import DataError, NumericsError
from torchtitan.training.guard import Guard

NAN = float("nan")


SOME = torch.tensor(7.0)


def feed(guard, step, loss, norm, flags=(0, 0), learned=7.0):
    flags = torch.tensor(flags, dtype=torch.float64)
    mask = guard.update(step, torch.tensor(loss), torch.tensor(norm), flags, torch.tensor(learned))
    guard.check()
    guard.start_report()
    return mask.item()


def test_a_bad_step_masks_itself_and_all_later_ones_and_is_reported_one_step_late():
    guard = Guard(torch.device("cpu"), 2)
    assert feed(guard, 1, 2.0, 1.0) == 0.0
    assert feed(guard, 2, 2.0, NAN) == 1.0
    with pytest.raises(
        NumericsError, match=r"step 2: loss=2, grad_norm=nan; every rank's loss was finite"
    ):
        feed(guard, 3, 2.0, 1.0)
    assert guard.update(4, torch.tensor(1.0), torch.tensor(1.0), torch.zeros(2), SOME).item() == 1.0


def test_the_rank_is_named_and_the_first_bad_step_is_kept():
    guard = Guard(torch.device("cpu"), 2)
    guard.update(7, torch.tensor(NAN), torch.tensor(NAN), torch.tensor([0.0, 1.0]), SOME)
    guard.update(8, torch.tensor(NAN), torch.tensor(NAN), torch.tensor([1.0, 1.0]), SOME)
    with pytest.raises(NumericsError, match=r"step 7: loss=nan.*the loss of rank 1 was not finite"):
        guard.check_now()


def test_finite_steps_report_nothing():
    guard = Guard(torch.device("cpu"), 1)
    guard.check()
    assert feed(guard, 1, 0.0, 0.0, (0,)) == 0.0
    guard.check_now()


def test_steps_without_a_token_to_learn_from_are_told_once_and_counted(caplog):
    guard = Guard(torch.device("cpu"), 1, most_empty=3)
    for step, learned in enumerate([5.0, 0.0, 0.0, 1.0, 0.0, 0.0], 1):
        assert feed(guard, step, 0.0, 0.0, (0,), learned) == 0.0  # it masks no update
    assert guard.empty_steps == 3  # the last one is not read yet
    guard.check_now()
    assert guard.empty_steps == 4
    (told,) = caplog.messages
    assert told.startswith("a step had no token to learn from")
    feed(guard, 7, 0.0, 0.0, (0,), 0.0)
    with pytest.raises(DataError, match="3 steps in a row had no token to learn from"):
        guard.check_now()


def test_without_a_limit_empty_steps_end_nothing():
    guard = Guard(torch.device("cpu"), 1)
    for step in range(9):
        feed(guard, step, 0.0, 0.0, (0,), 0.0)
    guard.check_now()
    assert guard.empty_steps == 9
