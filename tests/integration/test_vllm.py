"""An exported folder in vLLM, which runs in an environment of its own: greedy tokens are ours."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.made_once import smollm2, vllm_python
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.export import Target, export
from torchtitan.checkpoint.hugging_face.weights import LiveWeights
from torchtitan.data.tokenizer import BUNDLED, Tokenizer
from torchtitan.generation.generator import Generator
from torchtitan.generation.sampling import Sampling
from torchtitan.generation.source import open_source
from torchtitan.models.layers.init import init_weights
from torchtitan.models.llama3.sizes import llama3
from torchtitan.models.qwen3.sizes import qwen3

pytestmark = pytest.mark.slow
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
N_NEW = 24


def ask_vllm(folder, prompts, tmp_path):
    """What the worker answers; see there."""
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    text = {"model": str(folder), "prompts": prompts, "chat": CHAT, "max_tokens": N_NEW}
    request.write_text(json.dumps(text), encoding="utf-8")
    done = subprocess.run(
        [vllm_python(), Path(__file__).with_name("vllm_worker.py"), request, answer],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | VARIABLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(answer.read_text(encoding="utf-8"))


def check(folder, tmp_path):
    """vLLM continues texts and answers a chat as we do; returns our answer."""
    source = open_source(str(folder), device=torch.device("cpu"))
    prompts = [source.tokenizer.encode(text) for text in ("def main", "import os\nos.path.", "The")]
    chat = source.encode_chat(CHAT)
    *want, answer = Generator(source.model, source.tokenizer).generate(
        [*prompts, chat],
        Sampling.Config(temperature=0),
        max_new_tokens=N_NEW,
        stop_ids=source.stop_ids,
    )
    found = ask_vllm(folder, prompts, tmp_path)
    assert found["prompts"] == [one.ids for one in want]
    assert found["chat"]["prompt"] == chat
    assert found["chat"]["ids"] == answer.ids
    assert found["chat"]["finish_reason"] == answer.ending
    return answer, found["chat"]


@pytest.mark.parametrize("config", [llama3("debug"), qwen3("debug")], ids=["llama3", "qwen3"])
def test_greedy_tokens_of_an_export_are_ours(config, tmp_path):
    model = config.build()
    init_weights(model, seed=0)
    template = Tokenizer.Config().build().chat_template
    target = Target(
        folder=tmp_path / "m", dtype="float32", tokenizer=BUNDLED, chat_template=template
    )
    export(LiveWeights(model), config, target, Agreement())
    check(tmp_path / "m", tmp_path)


def test_a_real_model_answers_as_here_and_stops_at_the_end_of_its_turn(tmp_path):
    ours, theirs = check(smollm2(), tmp_path)
    assert ours.text == theirs["text"] == "The capital of France is Paris."
    assert ours.ending == theirs["finish_reason"] == "stop"
