"""The shipped tokenizer is what its script makes."""

import importlib.util
import itertools
import json
import platform
from pathlib import Path

import pytest

from torchtitan.data.tokenizer import BUNDLED

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_tokenizer.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_tokenizer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_is_deterministic_and_of_the_shipped_kind(script):
    texts = list(itertools.islice(script.embedded_texts(), 40))
    one, two = (json.loads(script.train(texts, 600).to_str()) for _ in range(2))
    assert one == two
    assert len(one["model"]["vocab"]) == 600
    shipped = json.loads(BUNDLED.read_text(encoding="utf-8"))
    for part in ("pre_tokenizer", "decoder", "normalizer", "post_processor", "added_tokens"):
        assert one[part] == shipped[part]
    bytes_and_specials = [token for token, i in shipped["model"]["vocab"].items() if i < 16 + 256]
    assert [
        token for token, i in one["model"]["vocab"].items() if i < 16 + 256
    ] == bytes_and_specials


@pytest.mark.slow
@pytest.mark.skipif(
    platform.python_version() != "3.11.7", reason="the text differs between Python versions"
)
def test_the_script_makes_the_shipped_file(script):
    made = script.train(script.embedded_texts(), 4096)
    assert made.to_str(pretty=True) + "\n" == BUNDLED.read_text(encoding="utf-8")
