"""Models of transformers, loaded here, compute the same; and back."""

import pytest
import torch

from tests.families import KINDS, SCALINGS, logits_of, ours, rows, theirs
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.export import Target, export
from torchtitan.checkpoint.hugging_face.folder import read_model
from torchtitan.checkpoint.hugging_face.weights import LiveWeights

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_an_imported_model_are_those_of_transformers(kind, tmp_path):
    reference = theirs(kind)
    reference.save_pretrained(tmp_path)
    tokens = rows()
    with torch.no_grad():
        want = reference(input_ids=tokens).logits
    assert want.std() > 0.3
    torch.testing.assert_close(logits_of(ours(tmp_path), tokens), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling_is_that_of_transformers(scaling, tmp_path):
    rope = {"rope_theta": 500.0, **SCALINGS[scaling]}
    reference = theirs("qwen3", rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    tokens = rows()
    with torch.no_grad():
        want = reference(input_ids=tokens).logits
        plain = theirs("qwen3")(input_ids=tokens).logits
    assert (want - plain).abs().max() > 1e-2  # the scaling is seen
    torch.testing.assert_close(logits_of(ours(tmp_path), tokens), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_an_export_and_computes_the_same(kind, tmp_path):
    theirs(kind).save_pretrained(tmp_path / "in")
    _, config = read_model(tmp_path / "in")
    model = ours(tmp_path / "in")
    target = Target(folder=tmp_path / "out", dtype="float32", max_shard_bytes=20_000)
    verdict = export(LiveWeights(model), config, target, Agreement())
    assert "read back: all equal the model's weights, bit for bit" in str(verdict)
    reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert {key: value for key, value in report.items() if value} == {}
    assert reloaded.config.dtype == torch.float32
    tokens = rows(seed=1)
    with torch.no_grad():
        want = reloaded.eval()(input_ids=tokens).logits
    torch.testing.assert_close(logits_of(model, tokens), want, rtol=1e-4, atol=1e-4)
    same = transformers.AutoConfig.from_pretrained(tmp_path / "in")
    for key in ("rope_parameters", "head_dim", "sliding_window", "num_key_value_heads"):
        assert getattr(reloaded.config, key, None) == getattr(same, key, None) or key == "head_dim"


@pytest.mark.parametrize("kind", ["llama3", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_greedy_continuations_are_equal(kind, tmp_path):
    reference = theirs(kind)
    reference.save_pretrained(tmp_path)
    model, tokens = ours(tmp_path), rows(seq_len=7)
    with torch.no_grad():
        want = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    for _ in range(12):
        tokens = torch.cat((tokens, logits_of(model, tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens, want)


@pytest.mark.parametrize("kind", ["llama3", "mistral", "qwen3_moe"])
def test_packed_and_padded_rows_are_the_single_documents_of_transformers(kind, tmp_path):
    reference = theirs(kind)
    reference.save_pretrained(tmp_path)
    model, tokens = ours(tmp_path), rows(1, 40)
    lengths = (13, 19, 8)
    with torch.no_grad():
        want = torch.cat([reference(input_ids=part).logits for part in tokens.split(lengths, 1)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = logits_of(model, tokens, positions, ids)
    torch.testing.assert_close(packed, want, rtol=1e-4, atol=1e-4)

    two = rows(2, 20, seed=2)
    attended = torch.ones_like(two)
    attended[0, 14:] = 0  # padding on the right
    with torch.no_grad():
        padded = reference(input_ids=two, attention_mask=attended).logits
    ours_padded = logits_of(model, two, document_ids=1 - attended)
    real = attended.bool()
    torch.testing.assert_close(ours_padded[real], padded[real], rtol=1e-4, atol=1e-4)
