"""A model of ours in lm-eval gives what the model of transformers gives there."""

import json
import shutil

import pytest
import torch

from tests.families import theirs
from torchtitan.cli.main import main
from torchtitan.data.tokenizer import BUNDLED
from torchtitan.errors import ConfigError
from torchtitan.evaluation.harness import (
    Prompts,
    Settings,
    Tasks,
    _manager,
    evaluate,
    model_class,
    sampling_of,
)
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # those of lm-eval and transformers
GREEDY = Sampling.Config(temperature=0.0)
PAIRS = [
    ("def main", "():"),
    ("def main ", "x = 1"),
    ("", "import os"),
    ("a " * 60, "b"),
    ("one two", " three four"),
]
TEXTS = ["def main():\n    return 1\n" * 12, "naïve", "import os"]
ROWS = [
    {"question": f"{a} plus {b} is", "choices": ["two", "three", "four", "nine"], "gold": a % 4, "answer": "four"}
    for a in range(3) for b in range(3)
]  # fmt: skip
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{question}}"
"""
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_writing": """
output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def folder(request, tmp_path_factory):
    """A random model of transformers; its tokenizer adds a first token, or does not."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    reference = theirs("llama3", vocab_size=4096)
    first, last = "<|begin_of_text|>", "<|end_of_text|>"
    tokens = tokenizers.Tokenizer.from_file(str(BUNDLED))
    if request.param:
        tokens.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokens.token_to_id(first))]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token=first, eos_token=last, pad_token=last
    )
    fast.chat_template = BUNDLED.with_name("chatml.jinja").read_text(encoding="utf-8")
    reference.generation_config.eos_token_id = tokens.token_to_id(last)
    reference.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with three tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    common = COMMON.replace("DATA", str(folder / "data.jsonl"))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{common}{text}", encoding="utf-8")
    return folder


def ours(folder, *, chat=False, **settings):
    source = open_source(str(folder), device=torch.device("cpu"))
    return source, Settings(**{"seq_len": 64, "batch_rows": 3, "chat": chat, **settings})


def reference_of(folder):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    return huggingface.HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=3, max_length=64
    )


def requests(kind, arguments):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    return [instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_log_likelihoods_and_greedy_texts(folder):
    theirs_, (source, settings) = reference_of(folder), ours(folder)
    model = model_class()(source, settings)
    asked = requests("loglikelihood", PAIRS)
    for got, want in zip(model.loglikelihood(asked), theirs_.loglikelihood(asked), strict=True):
        assert got[0] == pytest.approx(want[0], abs=1e-4)
        assert got[1] == want[1]
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert model.loglikelihood_rolling(asked) == pytest.approx(
        theirs_.loglikelihood_rolling(asked), abs=1e-3, rel=1e-5
    )
    wish = {"until": ["\n", "th"], "max_gen_toks": 12}
    asked = requests("generate_until", [(f"{context} x", wish) for context, _ in PAIRS])
    texts = model.generate_until(asked)
    assert texts == theirs_.generate_until(asked)
    assert any(texts)


def test_conversations(folder):
    theirs_, (source, settings) = reference_of(folder), ours(folder, chat=True)
    model = model_class()(source, settings)
    talk = [{"role": "user", "content": "2 + 2?"}]
    text = model.apply_chat_template(talk)
    assert text == theirs_.apply_chat_template(talk)
    assert model.tok_encode(text) == theirs_.tok_encode(text)
    begun = [*talk, {"role": "assistant", "content": "It is"}]
    assert model.apply_chat_template(begun, False) == theirs_.apply_chat_template(begun, False)
    asked = requests("loglikelihood", [(text, "four"), (text, "five")])
    for got, want in zip(model.loglikelihood(asked), theirs_.loglikelihood(asked), strict=True):
        assert got[0] == pytest.approx(want[0], abs=1e-4)
    assert model.chat_template(True) == theirs_.chat_template(True)


@pytest.mark.parametrize("chat", [False, True])
def test_scores_of_tasks(folder, tasks, chat):
    lm_eval = pytest.importorskip("lm_eval")
    managers = pytest.importorskip("lm_eval.tasks")
    names = [*TASKS][: 1 if chat else 3]
    manager = managers.TaskManager(include_path=str(tasks), include_defaults=False)
    shots = 2 if chat else None
    want = lm_eval.simple_evaluate(
        model=reference_of(folder), tasks=names, task_manager=manager, apply_chat_template=chat,
        fewshot_as_multiturn=chat, num_fewshot=shots, log_samples=False,
    )["results"]  # fmt: skip
    source, settings = ours(folder, chat=chat)
    got = evaluate(source, settings, Tasks(names=names, include_path=str(tasks), n_fewshot=shots))
    for name in names:
        assert got["results"][name].keys() == want[name].keys()
        for metric, value in want[name].items():
            found = got["results"][name][metric]
            assert found == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


def test_the_command(folder, tasks, capsys):
    pytest.importorskip("lm_eval")
    arguments = ["evaluate", str(folder), "--include-path", str(tasks), "--limit", "2"]
    assert main([*arguments, "--tasks", "tiny_choice,tiny_writing"]) == 0
    table = capsys.readouterr().out
    assert "|tiny_choice" in table
    assert "exact_match" in table
    assert main([*arguments, "--tasks", "tiny_rolling", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"]["tiny_rolling"]["bits_per_byte,none"] > 0
    assert found["n-samples"]["tiny_rolling"]["effective"] == 2
    shutil.move(tasks / "data.jsonl", tasks / "gone.jsonl")
    try:
        assert main([*arguments, "--tasks", "tiny_choice"]) == 3
    finally:
        shutil.move(tasks / "gone.jsonl", tasks / "data.jsonl")


@pytest.mark.slow  # lm-eval lists its own tasks
def test_a_task_that_is_not_there_is_named(tasks):
    pytest.importorskip("lm_eval")
    wrong = Tasks(names=["tiny_choice", "tiny_choise"], include_path=str(tasks))
    with pytest.raises(ConfigError, match="--tasks tiny_choise: there is no such task; "):
        _manager(wrong)


def test_what_a_task_wants_of_its_texts():
    assert sampling_of({"until": "x", "max_gen_toks": 8}) == (GREEDY, 8, ["x"])
    assert sampling_of({"do_sample": False, "temperature": 0.7, "top_p": 0.9}) == (GREEDY, 256, [])
    drawn = Sampling.Config(temperature=0.7, top_k=5)
    wanted = {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 3}
    assert sampling_of(wanted) == (drawn, 3, [])
    assert sampling_of({"do_sample": True})[0] == Sampling.Config()
    with pytest.raises(ConfigError, match=r"generation_kwargs: num_beams=4 is not known; choose"):
        sampling_of({"num_beams": 4})
    with pytest.raises(ConfigError, match="top_p=3: is not above 0 and up to 1"):
        sampling_of({"do_sample": True, "top_p": 3})


def test_without_a_chat_template_special_names_are_text(folder):
    source, settings = ours(folder)
    plain = Prompts(source, settings)
    ids = plain.encode("<|end_of_text|>")
    assert source.tokenizer.eos_id not in ids
    assert "end_of_text" in plain.decode(ids)
    chat = Prompts(*ours(folder, chat=True))
    text = chat.render([{"role": "user", "content": "a <|im_end|>"}], answer=True)
    end = source.tokenizer.vocab["<|im_end|>"]
    assert chat.encode(text).count(end) == 1
    with pytest.raises(ConfigError, match="ask with --chat"):
        plain.render([], answer=True)
