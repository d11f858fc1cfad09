"""Compiled blocks, with the backend that stops before code generation; inductor's turn is in tests/distributed."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tests.tiny import rows, tiny, tiny_model
from torchtitan.config import check_tree, differences
from torchtitan.errors import ConfigError
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.init import init_weights
from torchtitan.parallel.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
)
from torchtitan.parallel.compile import Compile, apply_compile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # dynamo looks at .grad of all

ON = Compile.Config(enabled=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(compile_config, mode="none", **model):
    with torch.device("meta"):
        made = tiny_model(**model).build()
    made.to_empty(device="cpu")
    init_weights(made, 0)
    apply_activation_checkpointing(made, ActivationCheckpointing.Config(mode=mode))
    apply_compile(made, compile_config)
    return made


def gradients(model, *, packed):
    """Gradients of two batches whose documents differ in number and length."""
    for seed in (0, 1):
        batch = rows(4, 32, 4096, seed)
        ids = batch["document_ids"] if packed else None
        model.head(model(batch["tokens"], batch["positions"], ids), batch["labels"]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("mode", "packed", "window"),
    [("none", True, None), ("full", True, None), ("full", False, 5), ("full", True, 5)],
)
def test_a_compiled_block_computes_the_same(mode, packed, window):
    attention = GQA.Config(n_heads=2, n_kv_heads=1, window=window)
    want = gradients(make(Compile.Config(), attention=attention), packed=packed)
    found = gradients(make(ON, mode, attention=attention), packed=packed)
    assert list(found) == list(want)
    for name, grad in found.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1  # whatever the documents are


def test_ten_blocks_that_recompute_some_operations_share_one_graph():
    want = gradients(make(Compile.Config(), n_layers=10), packed=True)
    found = gradients(make(ON, "selective", n_layers=10), packed=True)
    for name, grad in found.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def broken(model):
    feed_forward = model.layers[1].feed_forward
    compute = feed_forward.forward

    def forward(hidden_states):
        torch._dynamo.graph_break()
        return compute(hidden_states)

    feed_forward.forward = forward


def test_a_graph_break_names_the_block_and_the_remedy():
    model = make(ON)
    broken(model)
    with pytest.raises(ConfigError) as caught:
        gradients(model, packed=True)
    text = str(caught.value)
    assert text.startswith("compile.fullgraph=True: layers.1 is not one graph (")
    assert "test_compile.py" in text
    assert text.endswith("set compile.fullgraph=False or compile.enabled=False")


def test_without_fullgraph_the_pieces_run():
    want = gradients(make(Compile.Config()), packed=True)
    model = make(Compile.Config(enabled=True, backend="eager", fullgraph=False))
    broken(model)
    found = gradients(model, packed=True)
    for name, grad in found.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6)


@torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False)
def test_shapes_that_keep_changing_are_answered_in_words():
    model = make(Compile.Config(enabled=True, backend="eager"))

    def run(seq_len):
        batch = rows(2, seq_len, 4096)
        model(batch["tokens"], batch["positions"], batch["document_ids"])

    run(8)
    with pytest.raises(
        ConfigError,
        match=r"layers\.0 was compiled too often .* equal, or set compile.enabled=False",
    ):
        run(9)


def test_a_backend_that_fails_is_answered_in_words(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    model = make(Compile.Config())
    for block in model.blocks():
        monkeypatch.setattr(
            block,
            "compile",
            lambda fullgraph, backend, mode, b=block: type(b).compile(b, backend=fail),
        )
    apply_compile(model, ON)
    with pytest.raises(
        ConfigError,
        match=r"layers\.0 cannot be compiled .*no C\+\+ compiler.* or compile.enabled=False",
    ):
        gradients(model, packed=True)


def test_settings():
    config = tiny("x")
    config.compile = Compile.Config(
        enabled=True, backend="eager", mode="max-autotune-no-cudagraphs"
    )
    assert [str(problem) for problem in check_tree(config, 1)] == [
        "compile.mode=max-autotune-no-cudagraphs: is one of inductor's, but backend=eager; "
        "set mode default, or backend inductor"
    ]
    assert [d.changes_mathematics for d in differences(tiny("x"), config)] == [False] * 3
