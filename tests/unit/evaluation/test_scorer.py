"""Windows and batches leave the scores as they are."""

import numpy as np
import pytest
import torch

from tests.unit.generation.test_generator import model_of, without_cache
from torchtitan.evaluation.scorer import Scorer, Window, windows


def cut(n, seq_len, stride, scored=None):
    flags = np.ones(n, dtype=bool) if scored is None else scored
    return list(windows(np.arange(n), flags, seq_len=seq_len, stride=stride))


@pytest.mark.parametrize(("n", "seq_len", "stride"), [(1, 4, 2), (2, 4, 4), (5, 4, 4), (6, 4, 1), (23, 5, 3), (24, 6, 6)])  # fmt: skip
def test_each_token_is_predicted_once_with_enough_before_it(n, seq_len, stride):
    found = cut(n, seq_len, stride)
    predicted = [int(token) for window in found for token in window.tokens[window.scored]]
    assert predicted == list(range(1, n))
    for number, window in enumerate(found):
        assert len(window.tokens) <= seq_len + 1
        first = int(np.flatnonzero(window.scored)[0])
        assert first == 1 if number == 0 else first >= seq_len - stride + 1
        assert number == 0 or len(window.tokens) == seq_len + 1


def test_windows_without_a_scored_token_are_left_out():
    scored = np.zeros(30, dtype=bool)
    scored[[0, 17]] = True
    (window,) = cut(30, 6, 3, scored)
    assert window.tokens[window.scored].tolist() == [17]


def texts(lengths, seed=0):
    g = np.random.default_rng(seed)
    for length in lengths:
        scored = g.random(length) < 0.7
        scored[0], scored[-1] = False, True
        yield Window(g.integers(0, 67, length), scored)


def test_batched_is_one_by_one_and_both_are_the_plain_computation():
    model = model_of()
    own = without_cache(model, [5, 9], 6)
    asked = [*texts([2, 30, 7, 7, 19, 2, 3]), Window(np.array([5, 9, *own]), np.arange(8) > 1)]
    batched = list(Scorer(model, batch_rows=3).score(asked))
    model.head.chunk_tokens = 2
    single = list(Scorer(model, batch_rows=1).score(asked))
    assert single[-1].greedy.all()
    assert not all(scores.greedy.all() for scores in single)
    for window, one, other in zip(asked, batched, single, strict=True):
        ids = torch.tensor(window.tokens)[None]
        with torch.no_grad():
            states = model(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None])
            log_probs = (states @ model.head.weight.t()).log_softmax(-1)[0]
        places = np.flatnonzero(window.scored) - 1
        want = log_probs[places, window.tokens[places + 1]]
        np.testing.assert_allclose(one.log_probs, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-6, atol=1e-6)
        assert one.greedy.tolist() == (log_probs.argmax(-1)[places] == ids[0, places + 1]).tolist()
        assert one.greedy.tolist() == other.greedy.tolist()
