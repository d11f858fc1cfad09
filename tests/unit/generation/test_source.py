"""Models of transformers and checkpoints of ours, asked for text by name."""

import shutil

import pytest
import torch

from tests.families import KINDS, rows, theirs
from tests.tiny import running, tiny, weights
from torchtitan.cli.main import main
from torchtitan.data.tokenizer import BUNDLED, Tokenizer
from torchtitan.errors import ConfigError
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import Source, open_source
from torchtitan.models.decoder import Decoder

CPU = torch.device("cpu")


class NoText:
    def decode(self, ids):
        return ""


@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("kind", [k for k in KINDS if "moe" not in k])
def test_greedy_tokens_are_those_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    reference = theirs(kind)
    reference.generation_config = transformers.GenerationConfig(pad_token_id=0)
    reference.save_pretrained(tmp_path)
    shutil.copy(BUNDLED, tmp_path / "tokenizer.json")
    source = open_source(str(tmp_path), device=CPU, tokenizer=Tokenizer.Config())
    prompts = [rows(1, n, seed=n)[0].tolist() for n in (7, 3, 11)]
    found = Generator(source.model, NoText()).generate(
        prompts, Sampling.Config(temperature=0), max_new_tokens=16
    )
    for prompt, completion in zip(prompts, found, strict=True):
        with torch.no_grad():
            want = reference.generate(
                input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=16
            )
        assert completion.ids == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_laid_out_for_few_rows_and_stay_what_they_are(tied, tmp_path):
    config = tiny(tmp_path, steps=1)
    config.model.tied = tied
    with running(config) as trainer:
        trainer.train()
        want = weights(trainer)
    model = open_source(str(tmp_path), device=CPU).model
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())
    by_columns = {n for n, p in model.named_parameters() if p.ndim == 2 and p.stride(0) == 1}
    expected = {name for name in want if "proj" in name} | (set() if tied else {"head.weight"})
    assert by_columns == expected
    assert (model.head.weight is model.embedding.weight) == tied


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = tiny(folder, steps=1)
    config.model.hf_model_type = "llama"
    with running(config) as trainer:
        trainer.train()
    return folder


def test_a_checkpoint_is_asked_by_its_runs_folder(run_folder, capsys):
    source = open_source(str(run_folder), device=CPU)
    ids = source.encode("def main")
    want = Generator(source.model, source.tokenizer).generate(
        [ids], Sampling.Config(temperature=0), max_new_tokens=5, stop_ids=source.stop_ids
    )
    common = [str(run_folder), "--temperature", "0", "--max-new-tokens", "5"]
    assert main(["generate", *common, "--prompt", "def main"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == want[0].text.rstrip("\n")
    assert main(["generate", *common, "--prompt", "def main", "--prompt", "x = 1"]) == 0
    assert f"[1] {want[0].text}" in capsys.readouterr().out


def test_generation_ends_at_each_end_that_is_known():
    """The tokenizer's own, the template's, and what the folder names, which is a number or a list of them."""
    tokenizer = Tokenizer.Config().build()
    own = {tokenizer.eos_id, tokenizer.vocab["<|im_end|>"]}
    for named, more in ((None, set()), (7, {7}), ([7, 9], {7, 9}), (0, {0})):
        source = Source(Decoder.__new__(Decoder), tokenizer, {"eos_token_id": named})
        assert source.stop_ids == own | more
    assert Source(Decoder.__new__(Decoder), tokenizer, {}).stop_ids == own


def test_a_conversation_ends_with_the_input(run_folder, capsys, monkeypatch):
    answers = iter(["hello", "/new", "again"])

    def ask(prompt):
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    arguments = ["--max-new-tokens", "3", "--chat-template", "chatml", "--tokenizer", str(BUNDLED)]
    assert main(["chat", str(run_folder), *arguments]) == 0
    assert capsys.readouterr().out.count("\n") >= 3


def test_what_cannot_be_asked_is_named(run_folder, tmp_path, capsys):
    assert main(["generate", str(run_folder), "--temperature", "-1", "--prompt", "x"]) == 2
    assert "temperature=-1.0: is negative; set 0 for greedy" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nothing"), "--prompt", "x"]) == 4
    source = open_source(str(run_folder), device=CPU)
    source.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; name one with --chat-template"):
        source.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(("arguments", "code", "text"), [
    (["--max-new-tokens", "0"], 2, "--max-new-tokens=0: is not positive; set 1 or more"),
    (["--device", "foo"], 2, "--device=foo: is no device; set cpu, cuda or cuda:1"),
    (["--device", "cuda:99"], 2, "--device=cuda:99: this machine has "),
    (["--chat-template", "{{ raise_exception('never') }}", "--chat"], 2, "cannot write this conversation: the template refuses it: never"),
    (["--prompt", ""], 2, "--prompt number 2 is empty, and the tokenizer puts no token before text"),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments, code, text, model_folder, capsys):
    (model_folder / "tokenizer_config.json").write_text('{"bos_token": null}', encoding="utf-8")
    assert main(["generate", str(model_folder), "--prompt", "x", *arguments]) == code
    assert text in capsys.readouterr().err


@pytest.fixture
def model_folder(run_folder, tmp_path):
    """A Hugging Face folder."""
    assert main(["export", str(run_folder), str(tmp_path / "m")]) == 0
    return tmp_path / "m"


def test_a_folder_that_lacks_something(model_folder, capsys):
    """Settings of generation may be missing; a broken file, a tokenizer or a template that is needed may not."""
    ask = ["generate", str(model_folder), "--prompt", "x", "--max-new-tokens", "1"]
    (model_folder / "generation_config.json").unlink()
    assert main(ask) == 0
    (model_folder / "generation_config.json").write_text("{", encoding="utf-8")
    assert main(ask) == 4
    assert "generation_config.json cannot be read: Expecting property name" in capsys.readouterr().err  # fmt: skip
    (model_folder / "generation_config.json").write_text("[]", encoding="utf-8")
    assert main(ask) == 4
    assert "generation_config.json is no JSON object; mend or remove it" in capsys.readouterr().err
    (model_folder / "generation_config.json").unlink()
    (model_folder / "chat_template.jinja").unlink()
    assert main(["chat", str(model_folder)]) == 2
    assert "no chat template; name one with --chat-template" in capsys.readouterr().err
    (model_folder / "tokenizer.json").unlink()
    assert main(ask) == 4
    assert "m has no tokenizer.json; name a folder that has one with --tokenizer" in capsys.readouterr().err  # fmt: skip
    assert main([*ask, "--tokenizer", str(BUNDLED)]) == 0
