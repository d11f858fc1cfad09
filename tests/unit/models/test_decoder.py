import pytest
import torch

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.init import init_weights
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.layers.rope_scaling import LinearScaling, YarnScaling


def tiny(**changes):
    return Decoder.Config(
        **{
            "vocab_size": 61,
            "dim": 32,
            "n_layers": 2,
            "attention": GQA.Config(n_heads=4, n_kv_heads=2),
            "feed_forward": SwiGLU.Config(ffn_dim=48),
            "init_std": 0.2,
            **changes,
        }
    )


def make(config):
    model = config.build()
    init_weights(model, seed=1)
    return model


def packed(lengths, seq, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (1, seq), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    return tokens, positions, ids


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_equal_documents_alone(window):
    model = make(tiny(attention=GQA.Config(n_heads=4, n_kv_heads=2, window=window)))
    lengths = [5, 1, 9, 2]
    tokens, positions, ids = packed(lengths, sum(lengths))
    together = model(tokens, positions, ids)
    start = 0
    for n in lengths:
        alone = model(tokens[:, start : start + n], torch.arange(n)[None])
        torch.testing.assert_close(together[:, start : start + n], alone)
        start += n


def test_another_document_changes_nothing_and_later_tokens_change_nothing():
    model = make(tiny())
    tokens, positions, ids = packed([6, 6], 12)
    before = model(tokens, positions, ids)
    changed = tokens.clone()
    changed[:, :6] = (changed[:, :6] + 1) % 61
    after = model(changed, positions, ids)
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert not torch.equal(before[:, :6], after[:, :6])
    last = tokens.clone()
    last[:, 5] = (last[:, 5] + 1) % 61
    assert torch.equal(model(last, positions, ids)[:, :5], before[:, :5])


def test_rows_do_not_see_each_other():
    model = make(tiny())
    tokens, positions, ids = packed([4, 8], 12)
    other, other_positions, other_ids = packed([7, 5], 12, seed=1)
    both = model(
        torch.cat([tokens, other]),
        torch.cat([positions, other_positions]),
        torch.cat([ids, other_ids]),
    )
    torch.testing.assert_close(both[:1], model(tokens, positions, ids))
    torch.testing.assert_close(both[1:], model(other, other_positions, other_ids))


def test_tied_table_is_one_parameter_and_gets_both_gradients():
    model = make(tiny(tied=True))
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    tokens, positions, ids = packed([12], 12)
    labels = tokens.roll(-1, 1)
    model.head(model(tokens, positions, ids), labels).backward()
    both = model.embedding.weight.grad.clone()
    model.zero_grad()
    model.head(model(tokens, positions, ids).detach(), labels).backward()
    assert not torch.equal(both, model.embedding.weight.grad)


def test_initial_loss_is_near_the_logarithm_of_the_vocabulary():
    model = make(tiny(vocab_size=1000, dim=64, init_std=0.02))
    tokens = torch.randint(1000, (2, 64))
    hidden = model(tokens, torch.arange(64).expand(2, 64))
    loss = model.head(hidden, tokens) / tokens.numel()
    assert loss.item() == pytest.approx(torch.tensor(1000.0).log().item(), rel=0.1)


def test_check_names_the_value_and_the_remedy():
    problems = list(tiny(dim=30).check())
    assert [p.path for p in problems] == ["attention.n_heads"]
    assert "dim=30 / 4 features" in problems[0].reason
    assert "multiple of 2 * n_heads" in problems[0].remedy
    (problem,) = tiny(attention=GQA.Config(n_heads=4, n_kv_heads=3)).attention.check()
    assert problem.path == "n_kv_heads"
    assert problem.value == 3
    assert problem.reason == "does not divide n_heads=4"
    assert problem.remedy == "choose one of [1, 2, 4]"


def test_rows_are_not_longer_than_what_the_model_is_made_for():
    assert list(tiny(context_length=64).check_seq_len(64)) == []
    assert list(tiny(context_length=None).check_seq_len(10**9)) == []
    (problem,) = tiny(context_length=64).check_seq_len(65)
    assert str(problem) == (
        "seq_len=65: is more than the 64 tokens that the model is made for (model.context_length); set at most 64; "
        "to train the model for longer texts, set model.context_length=65 (and model.rope.scaling)"
    )
    stretched = RoPE.Config(scaling=YarnScaling.Config(factor=4.0, original_context=32))
    config = tiny(context_length=40, rope=stretched)  # as in config.json of a Qwen3 with YaRN
    assert list(config.check_seq_len(128)) == []
    (problem,) = config.check_seq_len(129)
    assert "more than the 128 tokens" in problem.reason
    linear = tiny(context_length=64, rope=RoPE.Config(scaling=LinearScaling.Config(factor=4.0)))
    assert len(list(linear.check_seq_len(65))) == 1
