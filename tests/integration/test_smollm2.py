"""The real SmolLM2-135M-Instruct: what transformers computes with it, we compute, and back."""

import json

import pytest
import torch

from tests.families import logits_of
from tests.made_once import smollm2 as smollm2_folder
from torchtitan.checkpoint.hugging_face.folder import model_differences
from torchtitan.cli.main import main
from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import open_source
from torchtitan.models.smollm2.sizes import smollm2

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of transformers
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "What is 12 + 30? Say <|im_end|> when you are done, in one short sentence.",
)


@pytest.fixture(scope="module")
def folder():
    return smollm2_folder()


@pytest.fixture(scope="module")
def source(folder):
    return open_source(str(folder), device=torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts(source):
    return [source.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


def their_logits(model, tokens, attended=None):
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=attended).logits


def close(found, want):
    assert want.std() > 1
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_folder_is_the_135m_of_our_table(folder):
    assert model_differences(smollm2("135m"), folder) == []


def test_logits_are_those_of_transformers_alone_padded_and_packed(source, reference, prompts):
    alone = [their_logits(reference, torch.tensor([ids]))[0] for ids in prompts]
    for ids, want in zip(prompts, alone, strict=True):
        close(logits_of(source.model, torch.tensor([ids]))[0], want)

    longest = max(map(len, prompts))
    padded = torch.tensor([ids + [2] * (longest - len(ids)) for ids in prompts])
    attended = torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i in prompts])
    real = attended.bool()
    found = logits_of(source.model, padded, document_ids=1 - attended)
    close(found[real], their_logits(reference, padded, attended)[real])

    packed = torch.cat([torch.tensor(ids) for ids in prompts])[None]
    lengths = torch.tensor(list(map(len, prompts)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.repeat_interleave(torch.arange(len(prompts)), lengths)[None]
    close(logits_of(source.model, packed, positions, ids)[0], torch.cat(alone))


def test_greedy_answers_in_a_batch_are_those_of_transformers_one_by_one(source, reference, prompts):
    found = Generator(source.model, source.tokenizer).generate(
        prompts, Sampling.Config(temperature=0), max_new_tokens=24, stop_ids=source.stop_ids
    )
    for ids, answer in zip(prompts, found, strict=True):
        want = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        assert answer.ids == want[0, len(ids) :].tolist()
    assert found[0].text == "The capital of France is Paris."
    assert found[0].ending == "stop"
    assert found[0].ids[-1] == source.tokenizer.vocab["<|im_end|>"]


@pytest.mark.parametrize("text", ["The sky is blue because", "x = 12345\n\n", "<|im_end|>"])
def test_plain_text_has_the_token_ids_of_transformers(text, source, their_tokenizer):
    want = their_tokenizer(text, split_special_tokens=True).input_ids  # what text names stays text
    assert source.encode(text) == want


@pytest.mark.parametrize("system", [None, "Answer in one sentence."])
def test_chats_have_the_token_ids_of_apply_chat_template(system, source, their_tokenizer):
    messages = [{"role": "system", "content": system}] if system else []
    for turn, text in enumerate(("What is 12 + 30?", "Und auf Deutsch: größer als 1000€? 🙂")):
        messages.append({"role": "user", "content": text})
        want = their_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert source.encode_chat(messages) == want, turn
        messages.append({"role": "assistant", "content": f"Answer {turn}.\n"})


def test_conversations_to_train_on_have_the_token_ids_of_apply_chat_template(
    folder, their_tokenizer
):
    rows = Docstrings.Config(split="validation").build_rows()
    tokenizer = Tokenizer.Config(path=str(folder)).build()
    config = ChatLoader.Config(sources=[Chat.Config(rows=Docstrings.Config(split="validation"))])
    source = config.sources[0].open(config.encoder(tokenizer, 2048))
    turn_end = tokenizer.vocab["<|im_end|>"]
    for index in range(len(rows)):
        sample, messages = source.sample(index), rows.read(index)["messages"]
        want = their_tokenizer.apply_chat_template(messages, return_dict=False)
        assert sample.tokens.tolist() == want
        learned = sample.tokens[sample.learned].tolist()
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode(learned) == "".join(f"{text}<|im_end|>" for text in answers)
        assert learned.count(turn_end) == len(answers)
    assert index > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_and_export_give_transformers_the_same_model(
    dtype, folder, reference, source, prompts, tmp_path, capsys
):
    assert main(["import", str(folder), str(tmp_path / "checkpoint")]) == 0
    assert "imported 272 tensors" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "checkpoint"), str(out), "--dtype", dtype]) == 0
    assert "read back: all equal the model's weights" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert again.dtype == getattr(torch, dtype)
    for name, parameter in reference.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.to(again.dtype)), name
    if dtype == "float32":
        tokens = torch.tensor([prompts[2]])
        close(logits_of(source.model, tokens), their_logits(again.eval(), tokens))
    generation = json.loads((out / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [source.tokenizer.vocab["<|im_end|>"]]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
