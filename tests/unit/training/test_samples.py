"""Texts that the model writes as it is trained."""

import json

import pytest
import torch

from tests.tiny import running, tiny, train
from torchtitan.config import check_tree
from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.generation.sampling import Sampling
from torchtitan.models.layers.attention import GQA
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.training.samples import Samples
from torchtitan.training.validation import Validation


def with_samples(folder, *, steps=4, **fields):
    config = tiny(folder, steps=steps)
    config.samples = Samples.Config(**{"every_n_steps": 2, "max_new_tokens": 5, **fields})
    return config


def held_out(config, *, chat):
    if chat:
        sources = [Chat.Config(rows=Docstrings.Config(split="validation"))]
        data = ChatLoader.Config(sources=sources, packing="streaming")
    else:
        data = Loader.Config(sources=[Embedded.Config(split="validation")])
    data.shuffle, data.n_workers = False, 0
    config.validation = Validation.Config(data=data, every_n_steps=0, steps=1)
    config.training.seq_len = 64
    return config


def written(folder):
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_training_does_not_notice(tmp_path):
    without = with_samples(tmp_path / "without", steps=5)
    without.samples = None
    want = train(without)
    random = torch.get_rng_state()
    sampling = Sampling.Config(temperature=1.0, seed=3)
    config = with_samples(tmp_path / "with", steps=5, prompts=["def main", "x"], sampling=sampling)
    losses, weights = train(config)
    assert losses == want[0]
    assert all(torch.equal(weights[name], want[1][name]) for name in weights)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_nor_do_compiled_blocks(tmp_path):
    found = []
    for samples in (None, Samples.Config(every_n_steps=1, prompts=["def"], max_new_tokens=9)):
        config = tiny(tmp_path / str(samples is None), steps=3)
        config.compile.enabled, config.compile.backend = True, "eager"
        config.samples = samples
        torch.compiler.reset()
        found.append(train(config)[0])
    assert found[0] == found[1]


def test_nor_do_the_counts_of_its_experts(tmp_path):
    found = []
    for samples in (None, Samples.Config(every_n_steps=1, prompts=["def"], max_new_tokens=3)):
        config = tiny(tmp_path / str(samples is None), steps=3, seq_len=16, global_batch_rows=2)
        config.model, config.samples = qwen3("debug_moe"), samples
        found.append(train(config)[0])
        rows = (tmp_path / str(samples is None) / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(row).get("moe_load_max") for row in rows])
    assert found[:2] == found[2:]


def test_they_are_logged_and_kept_with_their_step(tmp_path, capsys):
    with running(with_samples(tmp_path, steps=3, prompts=["def main", "x = "])) as trainer:
        trainer.train()
    rows = written(tmp_path)
    assert [(row["global_step"], row["prompt"]) for row in rows] == [
        (step, f"<|begin_of_text|>{text}") for step in (2, 3) for text in ("def main", "x = ")
    ]
    assert all(row["text"] and row["finish_reason"] == "length" for row in rows)
    told = capsys.readouterr().err
    assert "step 2/3  66% | sample 1 (length)\n  > <|begin_of_text|>def main\n" in told
    assert "\n    " + rows[0]["text"].split("\n")[0].rstrip() in told


def test_a_resumed_run_keeps_those_before_and_writes_the_others_again(tmp_path):
    config = with_samples(tmp_path, steps=4, every_n_steps=1, prompts=["a"])
    config.checkpoint.every_n_steps = 2
    with running(config) as trainer:
        trainer.train()
    first = written(tmp_path)
    config.checkpoint.resume = str(tmp_path / "checkpoints" / "step-00000002")
    with running(config) as trainer:
        assert [row["global_step"] for row in written(tmp_path)] == [1, 2]
        trainer.train()
    assert written(tmp_path) == first


def test_held_out_conversations_up_to_the_first_answer(tmp_path):
    with running(held_out(with_samples(tmp_path, steps=1), chat=True)) as trainer:
        prompts = [trainer.tokenizer.decode(ids) for ids in trainer.samples.prompts]
        asked = trainer.config.validation.data.prompt("Why?", trainer.tokenizer)
    assert len(prompts) == 2
    for prompt in prompts:
        assert prompt.startswith("<|im_start|>user\nWhat does the ")
        assert prompt.endswith("do?<|im_end|>\n<|im_start|>assistant\n")
    assert trainer.tokenizer.decode(asked) == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_held_out_texts_begin_as_they_do(tmp_path):
    with running(held_out(with_samples(tmp_path, held_out_rows=3), chat=False)) as trainer:
        text = Embedded.Config(split="validation").build().read(0)
        prompts = trainer.samples.prompts
        assert [len(ids) for ids in prompts] == [1 + 32] * 3
        assert text.startswith(trainer.tokenizer.decode(prompts[0][1:]))


def problems(config, world_size=1):
    return [str(problem) for problem in check_tree(config, world_size)]


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path):
    (text,) = problems(with_samples(tmp_path))
    assert "samples.prompts=[]: is empty, and there are no held-out rows" in text
    config = with_samples(tmp_path, prompts=["a", ""], max_new_tokens=0, every_n_steps=-1)
    assert len(problems(config)) == 3
    config = with_samples(tmp_path, prompts=["a"])
    config.parallelism.pp = 2
    (text,) = problems(config, 2)
    assert text.startswith("samples=set: texts are written token by token through all blocks")
    assert "parallelism.pp=2" in text
    config.parallelism.pp = 1
    config.model.attention = GQA.Config(n_heads=2, n_kv_heads=2)
    config.parallelism.tp = config.parallelism.cp = 2
    assert problems(config, 4) == []
