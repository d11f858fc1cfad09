"""The README's fine-tuning of SmolLM2-135M-Instruct, from its one command to the endpoint of a server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.families import logits_of
from tests.made_once import smollm2, vllm_python
from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import open_source
from torchtitan.metrics.sinks.jsonl import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of transformers
ROOT = Path(__file__).parents[2]
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def store_of_the_hub(home, name, folder):
    """The hub's own store with a model in it, as if it had been downloaded."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the user stands: a store of the hub that has the model, and no network."""
    place = tmp_path_factory.mktemp("user")
    store_of_the_hub(place / "hf_home", NAME, smollm2())
    return place


def bash(command, place, **options):
    """Run a line of the README."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(place / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    return subprocess.run(
        ["bash", "-c", command.replace("./run_train.sh", str(ROOT / "run_train.sh"))],
        cwd=place,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def line_of_the_readme(pattern):
    (line,) = re.findall(f"^.*{pattern}.*$", (ROOT / "README.md").read_text("utf-8"), re.M)
    return line


@pytest.fixture(scope="module")
def log(place):
    """What the README's command says while it trains."""
    done = bash(line_of_the_readme("CONFIG=smollm2_135m_sft"), place)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def run(place, log):
    """The run's folder."""
    return place / "outputs" / "smollm2_135m_sft"


@pytest.fixture(scope="module")
def source(run):
    return open_source(str(run / "hugging_face"), device=torch.device("cpu"))


@pytest.fixture(scope="module")
def questions():
    """Of held-out conversations."""
    rows = Docstrings.Config(split="validation").build_rows()
    return [rows.read(index)["messages"][:1] for index in range(0, len(rows), len(rows) // 5)]


def greedy(source, chats, n=160):
    return Generator(source.model, source.tokenizer).generate(
        [source.encode_chat(chat) for chat in chats],
        Sampling.Config(temperature=0),
        max_new_tokens=n,
        stop_ids=source.stop_ids,
    )


def test_the_held_out_loss_falls_clearly(run, log):
    rows = read_rows(run / "metrics.jsonl")
    found = {r["global_step"]: r["validation_loss"] for r in rows if "validation_loss" in r}
    first, *_, last = found.values()
    assert (min(found), max(found)) == (0, 40)
    assert last < first - 1.5
    assert sum("packing" in row for row in rows) == 40
    assert min(row["packing"] for row in rows if "packing" in row) > 0.9
    assert "read back: all equal the model's weights" in log


def test_transformers_loads_the_folder_and_computes_the_same(run, source, questions):
    transformers = pytest.importorskip("transformers")
    folder = run / "hugging_face"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [source.encode_chat(chat) for chat in questions]
    for ids in prompts:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            want = reference(input_ids=tokens).logits
        torch.testing.assert_close(logits_of(source.model, tokens), want, rtol=1e-4, atol=1e-4)
    answers = greedy(source, questions[:2], n=48)
    for ids, answer in zip(prompts, answers, strict=False):
        want = reference.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)
        assert answer.ids == want[0, len(ids) :].tolist()


def test_the_folder_has_the_weights_of_the_last_checkpoint(run, source):
    tokenizer = Tokenizer.Config(
        path=str(run / "hugging_face")
    )  # the run's own is a name on the hub
    trained = open_source(str(run), device=torch.device("cpu"), tokenizer=tokenizer)
    for (name, ours), theirs in zip(
        trained.model.named_parameters(), source.model.parameters(), strict=True
    ):
        assert torch.equal(ours.bfloat16().float(), theirs), name


def test_answers_stop_at_the_end_of_their_turn(source, questions):
    turn_end = source.tokenizer.vocab["<|im_end|>"]
    answers = greedy(source, questions)
    assert [answer.ending for answer in answers] == ["stop"] * len(questions)
    assert {answer.ids[-1] for answer in answers} == {turn_end}
    for answer in answers:
        assert 10 < len(answer.text) < 400
        assert "<|" not in answer.text


def test_the_user_generates_and_chats(run, place, source):
    question = "What does the function `bisect.insort` do?"
    (want,) = greedy(source, [[{"role": "user", "content": question}]])
    asked = f"torchtitan generate {{}} --chat --temperature 0 --prompt '{question}'"
    told = bash(asked.format(run / "hugging_face"), place)
    assert told.stdout == f"{want.text}\n", told.stderr
    told = bash(asked.format(run), place)  # float32, so the text may be another
    assert told.returncode == 0, told.stderr
    assert len(told.stdout.strip()) > 10
    line = line_of_the_readme("torchtitan chat outputs/smollm2_135m_sft")
    told = bash(f"{line.partition('#')[0]} --temperature 0", place, input=f"{question}\n/exit\n")
    assert told.returncode == 0, told.stderr
    assert told.stdout == f"> {want.text}\n> ", told.stderr


@contextmanager
def served(folder, log_path):
    """The address of vLLM's server for ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
        "--served-model-name", "my-model", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
    ]  # fmt: skip
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log_path.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}/health", process, log_path)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_it_answers(address, process, log_path):
    end = time.monotonic() + 1200
    while time.monotonic() < end:
        assert process.poll() is None, log_path.read_text("utf-8")[-4000:]
        try:
            with urllib.request.urlopen(address, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    raise AssertionError(log_path.read_text("utf-8")[-4000:])


def test_a_server_gives_the_same_answers_and_ends_them(run, source, questions, tmp_path):
    want = greedy(source, questions)
    with served(run / "hugging_face", tmp_path / "server.log") as address:
        for chat, answer in zip(questions, want, strict=True):
            body = {"model": "my-model", "messages": chat, "temperature": 0, "max_tokens": 160}
            request = urllib.request.Request(
                f"{address}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as reply:
                (choice,) = json.load(reply)["choices"]
            assert choice["message"]["content"] == answer.text
            assert choice["finish_reason"] == "stop"
