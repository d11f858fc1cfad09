"""Models of transformers, loaded here, compute the same; and back."""

import pytest
import torch

from tests.families import KINDS, SCALINGS, logits_of, ours, rows, theirs

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
