import pytest
import torch

from torchtitan.generation.sampling import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0]])


def probabilities(**settings):
    return Sampling.Config(**settings).build().probabilities(LOGITS)


def draws(n, logits=LOGITS[:1], history=(), **settings):
    sampler = Sampling.Config(**settings).build()
    (generator,) = sampler.generators(1)
    return [sampler(logits.clone(), [history], [generator])[0] for _ in range(n)]


def test_temperature_divides_the_logits():
    torch.testing.assert_close(probabilities(temperature=0.5), (LOGITS / 0.5).softmax(-1))
    assert draws(3, temperature=0) == [0, 0, 0]


def test_top_k_top_p_and_min_p_keep_the_likeliest():
    kept = probabilities(top_k=2)[0]
    torch.testing.assert_close(kept[:2], LOGITS[0, :2].softmax(-1))
    assert kept[2:].tolist() == [0, 0]
    # 0.644, 0.237, 0.087, 0.032: two are needed for 0.7
    assert (probabilities(top_p=0.7)[0] > 0).tolist() == [True, True, False, False]
    assert (probabilities(top_p=0.64)[0] > 0).tolist() == [True, False, False, False]
    assert (probabilities(min_p=0.1)[0] > 0).tolist() == [True, True, True, False]
    assert (probabilities(min_p=1.0)[0] > 0).tolist() == [True, False, False, False]


def test_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    assert draws(1, temperature=0, history=[0], repetition_penalty=3.0) == [1]
    logits = torch.tensor([[-1.0, -1.5]])
    assert draws(1, logits, temperature=0, history=[0, 0], repetition_penalty=2.0) == [1]
    assert draws(1, logits, temperature=0, history=[0, 1], repetition_penalty=2.0) == [0]
    every = {"temperature": 0, "repetition_penalty": 2.0}  # token there, however long ago, and once
    assert draws(1, torch.tensor([[3.0, 2.9, 1.6]]), history=[1, 0, 1, 0], **every) == [2]
    assert draws(1, torch.tensor([[3.0, 2.9, 1.0]]), history=[1, 0, 1, 0], **every) == [0]


def test_what_is_drawn_has_the_probabilities():
    counts = torch.bincount(torch.tensor(draws(4000, seed=3)), minlength=4) / 4000
    assert (counts - LOGITS[0].softmax(-1)).abs().max() < 0.03
    assert set(draws(500, top_k=2)) == {0, 1}
    assert draws(20, seed=3) == draws(20, seed=3) != draws(20, seed=4)


@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_the_probabilities_are_those_of_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    ids = logits.topk(4).indices[:, [1, 3, 1, 0]]  # what is likely, so that the penalty is seen
    config = Sampling.Config(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.03, repetition_penalty=1.3
    )
    sampler = config.build()
    found = sampler.probabilities(sampler._penalised(logits.clone(), ids.tolist()))
    found = found / found.sum(-1, keepdim=True)
    want = logits.clone()
    for step in (
        process.RepetitionPenaltyLogitsProcessor(1.3),
        process.TemperatureLogitsWarper(0.8),
        process.TopKLogitsWarper(20),
        process.TopPLogitsWarper(0.9),
        process.MinPLogitsWarper(0.03),
    ):
        want = step(ids, want)
    torch.testing.assert_close(found, want.softmax(-1))


def test_settings_that_are_none():
    config = Sampling.Config(
        temperature=-1.0, top_k=0, top_p=0.0, min_p=2.0, repetition_penalty=0.0
    )
    assert [str(problem) for problem in config.check()] == [
        "temperature=-1.0: is negative; set 0 for greedy",
        "top_k=0: is not positive; set None for all tokens",
        "top_p=0.0: is not above 0 and up to 1; set 1 for all tokens",
        "min_p=2.0: is not between 0 and 1; set 0 for all tokens",
        "repetition_penalty=0.0: is not positive; set 1 for none",
    ]


def test_top_p_leaves_out_what_is_not_needed_to_reach_it_exactly():
    probs = Sampling.Config(top_p=0.5).build().probabilities(torch.zeros(1, 2))
    assert sorted(probs[0].tolist()) == [0.0, 1.0]  # a half is enough, as in transformers
