import pytest
import torch

from tests.tiny import tiny_model
from torchtitan import torch_api
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.models.layers.attention import GQA, SDPA
from torchtitan.models.layers.feed_forward import SwiGLU
from torchtitan.models.layers.init import init_weights
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.parallel.tensor import apply_tensor_parallel

GREEDY = Sampling.Config(temperature=0)
PROMPTS = [[5, 9, 3, 17, 8], [2], [60, 1, 1, 44, 7, 9, 30, 12, 3], [11, 12]]


class Letters:
    """A token is a letter."""

    def decode(self, ids):
        return "".join(chr(ord("a") + i % 26) for i in ids)


def model_of(seed=0, **attention):
    config = tiny_model(
        vocab_size=67,
        dim=32,
        n_layers=3,
        attention=GQA.Config(
            **{"n_heads": 4, "n_kv_heads": 2, "qk_norm": RMSNorm.Config(), **attention}
        ),
        feed_forward=SwiGLU.Config(ffn_dim=48),
        init_std=0.4,  # far from uniform, so that no two tokens are as good as each other
    )
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


def without_cache(model, prompt, n_new):
    """Greedy, and the whole row again for each token."""
    ids = list(prompt)
    for _ in range(n_new):
        positions = torch.arange(len(ids))[None]
        with torch.no_grad():
            states = model(torch.tensor([ids]), positions)
            ids.append((states[0, -1] @ model.head.weight.t()).argmax().item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [None, 4])
def test_cached_and_batched_is_what_one_by_one_without_a_cache_gives(window):
    model = model_of(window=window)
    want = [without_cache(model, prompt, 12) for prompt in PROMPTS]
    assert len({token for row in want for token in row}) > 8
    generator = Generator(model, Letters())
    batch = generator.generate(PROMPTS, GREEDY, max_new_tokens=12)
    single = [generator.generate([p], GREEDY, max_new_tokens=12)[0] for p in PROMPTS]
    assert [c.ids for c in batch] == [c.ids for c in single] == want
    assert {c.ending for c in batch} == {"length"}
    assert batch[0].text == Letters().decode(want[0])


def test_the_penalty_repeats_neither_what_was_asked_nor_what_was_said():
    model, n_new = model_of(), 10
    config = Sampling.Config(temperature=0, repetition_penalty=1e6)  # what was there is never best
    found = Generator(model, Letters()).generate(PROMPTS, config, max_new_tokens=n_new)
    plain = Generator(model, Letters()).generate(PROMPTS, GREEDY, max_new_tokens=n_new)
    assert any(set(c.ids) & set(prompt) for c, prompt in zip(plain, PROMPTS, strict=True))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        assert len({*prompt, *completion.ids}) == len(set(prompt)) + n_new


def test_a_drawn_row_does_not_depend_on_its_batch():
    generator = Generator(model_of(), Letters())
    sampling = Sampling.Config(temperature=1.5, seed=7)
    batch = generator.generate(PROMPTS, sampling, max_new_tokens=10)
    for i, prompt in enumerate(PROMPTS):
        alone = Sampling.Config(temperature=1.5, seed=7 + i)
        assert generator.generate([prompt], alone, max_new_tokens=10)[0].ids == batch[i].ids
    again = generator.generate(PROMPTS, sampling, max_new_tokens=10)
    other = generator.generate(PROMPTS, Sampling.Config(temperature=1.5, seed=8), max_new_tokens=10)
    assert [c.ids for c in again] == [c.ids for c in batch] != [c.ids for c in other]


def test_rows_end_by_themselves_and_the_others_go_on_as_before():
    generator = Generator(model_of(), Letters())
    free = generator.generate(PROMPTS, GREEDY, max_new_tokens=12)
    stop = free[2].ids[3]
    found = generator.generate(PROMPTS, GREEDY, max_new_tokens=12, stop_ids=[stop])
    assert found[2].ending == "stop"
    for before, after in zip(free, found, strict=True):
        end = before.ids.index(stop) + 1 if stop in before.ids else 12
        assert after.ids == before.ids[:end]
        kept = before.ids[: end - 1] if stop in before.ids else before.ids
        assert after.text == Letters().decode(kept)


def test_a_stop_string_ends_a_row_and_is_not_in_its_text():
    generator = Generator(model_of(), Letters())
    free = generator.generate(PROMPTS[:1], GREEDY, max_new_tokens=12)[0]
    stop = free.text[4:7]
    found = generator.generate(PROMPTS[:1], GREEDY, max_new_tokens=12, stop_strings=[stop])[0]
    assert found.ending == "stop"
    assert found.text == free.text[: free.text.index(stop)]
    assert len(found.ids) == free.text.index(stop) + 3


def test_streamed_pieces_are_the_text_and_a_held_end_comes_with_the_last():
    generator = Generator(model_of(), Letters())
    text = generator.generate(PROMPTS[:1], GREEDY, max_new_tokens=6)[0].text
    stops = [text[5] + "!"]  # may begin with the last letter, so that is held until the end
    pieces = list(generator.stream(PROMPTS[:1], GREEDY, max_new_tokens=6, stop_strings=stops))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ending for piece in pieces] == [None] * 5 + ["length"]


def test_the_model_is_as_before_afterwards():
    model = model_of().train()
    generator = Generator(model, Letters())
    stream = generator.stream(PROMPTS, GREEDY, max_new_tokens=5)
    next(stream)
    stream.close()  # also when nobody wants the rest
    assert model.training
    assert all(type(layer.attention.inner) is SDPA for layer in model.layers)


def test_what_cannot_be_continued_is_named():
    generator = Generator(model_of(), Letters())
    with pytest.raises(ValueError, match=r"prompts \[1\] have no token and max_new_tokens=4"):
        generator.generate([[1], []], GREEDY, max_new_tokens=4)
    assert generator.generate([], GREEDY, max_new_tokens=4) == []


def on_ranks(sampling):
    """What a rank of a tensor-parallel model generates; the vocabulary of 67 is divided unevenly."""
    config = model_of().config
    with torch.device("meta"):
        model = config.build()
    mesh = torch_api.init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",)
    )
    apply_tensor_parallel(model, mesh, sequence_parallel=False)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    found = Generator(model, Letters()).generate(PROMPTS, sampling, max_new_tokens=8)
    return [completion.ids for completion in found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rank_of_a_cut_model_gives_what_a_whole_one_gives(ranks, temperature):
    sampling = Sampling.Config(temperature=temperature)
    found = Generator(model_of(), Letters()).generate(PROMPTS, sampling, max_new_tokens=8)
    want = [completion.ids for completion in found]
    assert ranks(on_ranks, 2, sampling) == [want] * 2
