"""Perplexity of files is the plain computation with transformers."""

import json
import math
import shutil

import pytest
import torch

from tests.families import theirs
from torchtitan.cli.main import main
from torchtitan.data.tokenizer import BUNDLED, Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
TEXTS = ["def main():\n    return 1\n", "Wörter → naïve café", "x", "one two three " * 30]
CHAT = [
    {"role": "user", "content": "What is 2 plus 2?"},
    {"role": "assistant", "content": "It is 4, naïvely."},
    {"role": "user", "content": "And 3 plus 3?"},
    {"role": "assistant", "content": "Six."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of transformers, and its folder."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    reference = theirs("llama3", vocab_size=4096)
    reference.save_pretrained(folder)
    shutil.copy(BUNDLED, folder / "tokenizer.json")
    shutil.copy(BUNDLED.with_name("chatml.jinja"), folder / "chat_template.jinja")
    return reference, folder


def ask(capsys, *arguments):
    assert main(["perplexity", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def nats(reference, ids, scored):
    """Of the scored tokens, given all before them in ``ids``."""
    with torch.no_grad():
        log_probs = reference(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return -sum(log_probs[place - 1, ids[place]].item() for place in scored)


def test_texts(model, tmp_path, capsys):
    reference, folder = model
    tokenizer = Tokenizer.Config().build()
    documents = [[tokenizer.bos_id, *tokenizer.encode(t), tokenizer.eos_id] for t in TEXTS]
    lines = "\n".join(json.dumps({"text": text}) for text in [*TEXTS, ""])
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    found = ask(capsys, folder, tmp_path / "a.jsonl", "--seq-len", 512)
    want = sum(nats(reference, ids, range(1, len(ids))) for ids in documents)
    scored = sum(len(ids) - 1 for ids in documents)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (found["documents"], found["scored"], found["n_bytes"]) == (4, scored, n_bytes)
    assert found["counts"] == {"documents": 4, "dropped_empty": 1}
    assert found["nats"] == pytest.approx(want, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(want / scored), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(want / math.log(2) / n_bytes, rel=1e-5)
    assert ask(capsys, folder, tmp_path / "*.jsonl", "--seq-len", 512, "--batch-rows", 1)[
        "nats"
    ] == pytest.approx(found["nats"], rel=1e-6)


def test_a_document_longer_than_the_window(model, tmp_path, capsys):
    reference, folder = model
    (tmp_path / "long.txt").write_text(TEXTS[3], encoding="utf-8")
    tokenizer = Tokenizer.Config().build()
    ids = [tokenizer.bos_id, *tokenizer.encode(TEXTS[3]), tokenizer.eos_id]
    want, done, seq_len, stride = 0.0, 1, 24, 10
    while done < len(ids):
        end = min(len(ids), done + (stride if done > 1 else seq_len))
        start = max(0, end - seq_len - 1)
        want += nats(reference, ids[start:end], range(done - start, end - start))
        done = end
    asked = (folder, tmp_path / "long.txt", "--seq-len", seq_len, "--stride", stride)
    found = ask(capsys, *asked)
    assert (found["scored"], found["seq_len"], found["stride"]) == (len(ids) - 1, 24, 10)
    assert found["nats"] == pytest.approx(want, rel=1e-5)
    assert found["nats"] != pytest.approx(ask(capsys, *asked[:2])["nats"], rel=1e-4)


@pytest.mark.parametrize("learn", ["assistant", "last", "all"])
def test_conversations(model, tmp_path, capsys, learn):
    transformers = pytest.importorskip("transformers")
    reference, folder = model
    (tmp_path / "chat.json").write_text(json.dumps([{"messages": CHAT}]), encoding="utf-8")
    found = ask(capsys, folder, tmp_path / "chat.json", "--learn", learn)
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokens.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    ids = tokens.apply_chat_template(CHAT, return_dict=False)
    end, header = tokens.convert_tokens_to_ids("<|im_end|>"), "<|im_start|>assistant\n"
    scored, texts = [], []
    for answer in (3, 1):
        before = tokens.apply_chat_template(
            CHAT[:answer], add_generation_prompt=True, return_dict=False
        )
        assert tokens.decode(before).endswith(header)
        scored += range(len(before), ids.index(end, len(before)) + 1)
        texts.append(CHAT[answer]["content"])
        if learn == "last":
            break
    if learn == "all":
        scored = range(1, len(ids))
    else:
        assert found["n_bytes"] == sum(len(text.encode()) for text in texts)
    assert found["scored"] == len(scored)
    assert found["nats"] == pytest.approx(nats(reference, ids, scored), rel=1e-5)


def test_other_columns_and_what_a_person_reads(model, tmp_path, capsys):
    _, folder = model
    (tmp_path / "a.csv").write_text('body\n"one two three"\n"four"\n', encoding="utf-8")
    arguments = [str(folder), str(tmp_path / "a.csv"), "--column", "text=body"]
    assert main(["perplexity", *arguments, "--limit", "1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("1 documents of ")
    assert "bits per byte" in told


def test_errors_have_the_codes_of_their_kind(model, tmp_path, capsys):
    _, folder = model
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    good = tmp_path / "good.txt"
    good.write_text("good", encoding="utf-8")
    assert main(["perplexity", str(folder), str(tmp_path / "none.txt")]) == 3
    assert main(["perplexity", str(folder), str(tmp_path / "empty.jsonl")]) == 3
    assert "nothing is there to predict" in capsys.readouterr().err
    assert main(["perplexity", str(tmp_path / "nothing"), str(good)]) == 4
    assert main(["perplexity", str(folder), str(good), "--seq-len", "8", "--stride", "9"]) == 2
    assert "--stride=9: is more than the 8 tokens of a window" in capsys.readouterr().err
    assert main(["perplexity", str(folder), str(good), "--batch-rows", "0", "--column", "x=y"]) == 2
    assert "2 problems" in capsys.readouterr().err
    assert main(["perplexity", "--help"]) == 0


def test_broken_weights_are_numerics(model, tmp_path, capsys):
    reference, folder = model
    shutil.copytree(folder, tmp_path / "broken")
    weights = dict(reference.state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"] * math.nan
    reference.save_pretrained(tmp_path / "broken", state_dict=weights)
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    assert main(["perplexity", str(tmp_path / "broken"), str(tmp_path / "a.txt")]) == 5
    assert "the weights are broken" in capsys.readouterr().err
