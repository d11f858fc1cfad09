import dataclasses

import pytest
import torch
import torch.nn.functional as F

from torchtitan.models.layers.init import init_weights
from torchtitan.models.layers.moe import MoE
from torchtitan.models.qwen3.sizes import SIZES, qwen3


def on_meta(name):
    with torch.device("meta"):
        return qwen3(name).build()


@pytest.mark.parametrize(
    ("name", "total", "active", "matmul"),
    [
        ("0.6b", 596_049_920, 596_049_920, 595_984_384),
        ("1.7b", 1_720_574_976, 1_720_574_976, 1_720_451_072),
        ("4b", 4_022_468_096, 4_022_468_096, 4_022_272_000),
        ("8b", 8_190_735_360, 8_190_735_360, 7_568_097_280),
        ("14b", 14_768_307_200, 14_768_307_200, 13_989_969_920),
        ("32b", 32_762_123_264, 32_762_123_264, 31_983_534_080),
        ("30b_a3b", 30_532_122_624, 3_353_032_704, 3_041_656_832),
        ("235b_a22b", 235_093_634_560, 22_190_763_520, 21_567_635_456),
    ],
)
def test_parameter_counts_are_those_of_the_public_models(name, total, active, matmul):
    counts = on_meta(name).parameter_counts()
    assert (counts.total, counts.active, counts.matmul) == (total, active, matmul)


@pytest.mark.parametrize(
    ("name", "causal", "full"), [("0.6b", 4.99e9, 6.39e9), ("1.7b", 11.73e9, 13.14e9), ("8b", 49.0e9, 52.7e9)]
)  # fmt: skip
def test_flops_per_token_matches_the_published_figures(name, causal, full):
    model = on_meta(name)
    assert model.flops_per_token(4096) == pytest.approx(causal, rel=2e-3)
    assert model.flops_per_token(4096, causal=False) == pytest.approx(full, rel=2e-3)


@pytest.mark.parametrize("name", SIZES)
def test_flops_per_token_is_the_closed_form(name):
    size = SIZES[name]
    head, kv = size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    ffn = 3 * size.dim * size.ffn_dim
    if size.n_experts:
        ffn = size.top_k * ffn + size.n_experts * size.dim  # the chosen experts, and the router
    layer = size.dim * (2 * head + 2 * kv) + ffn
    matmul = size.n_layers * layer + size.vocab_size * size.dim
    model = on_meta(name)
    assert model.parameter_counts().matmul == matmul
    assert model.flops_per_token(1000) == 6 * matmul + 6 * size.n_layers * head * 1000


@pytest.mark.parametrize("name", SIZES)
def test_tied_sizes_share_the_table(name):
    model = on_meta(name)
    assert (model.head.weight is model.embedding.weight) == (
        name in ("debug", "0.6b", "1.7b", "4b")
    )


def small(name):
    """A model of ``name``'s kind with random weights, in which no norm is trivial."""
    config = qwen3(name)
    config = dataclasses.replace(config, vocab_size=97, dim=32, n_layers=3, init_std=0.2)
    config.attention = dataclasses.replace(config.attention, n_heads=4, n_kv_heads=2, head_dim=24)
    config.feed_forward = dataclasses.replace(config.feed_forward, ffn_dim=40)
    model = config.build()
    init_weights(model, seed=7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.5 * torch.rand(parameter.shape, generator=generator))
    return model


def token_rows():
    tokens = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(11).expand(2, 11)


def logits_of(model):
    return model(*token_rows()) @ model.head.weight.t()


def logits_written_out(model):
    """Qwen3 in one function, from its paper and its public code: one row, head and token at a time where it is simple."""
    config, w = model.config, dict(model.named_parameters())
    tokens, _ = token_rows()
    head_dim, group = config.attention.head_dim, 2

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def rotate(x):  # (S, Dh)
        i = torch.arange(head_dim // 2)
        angle = torch.arange(len(x))[:, None] * config.rope.theta ** (-2 * i / head_dim)
        a, b = x[:, : head_dim // 2], x[:, head_dim // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 1)

    def attention(x, p):  # (S, D)
        out = []
        for head in range(4):
            at = slice(head * head_dim, (head + 1) * head_dim)
            kv = slice(head // group * head_dim, (head // group + 1) * head_dim)
            q = rotate(norm(x @ w[p + "q_proj.weight"][at].t(), w[p + "q_norm.weight"]))
            k = rotate(norm(x @ w[p + "k_proj.weight"][kv].t(), w[p + "k_norm.weight"]))
            v = x @ w[p + "v_proj.weight"][kv].t()
            scores = q @ k.t() / head_dim**0.5
            later = torch.ones_like(scores).triu(1).bool()
            out.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
        return torch.cat(out, 1) @ w[p + "out_proj.weight"].t()

    def swiglu(x, gate, up, down):
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def feed_forward(x, p):
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        if p + names[0] in w:
            return swiglu(x, *(w[p + name] for name in names))
        top_k = config.feed_forward.router.top_k
        chosen = (x @ w[p + "router.gate.weight"].t()).softmax(-1).topk(top_k)
        shares = chosen.values / chosen.values.sum(-1, keepdim=True)
        return torch.stack([
            sum(s * swiglu(token, *(w[f"{p}experts.{n}"][e] for n in names)) for e, s in zip(experts, share, strict=True))
            for token, experts, share in zip(x, chosen.indices.tolist(), shares, strict=True)
        ])  # fmt: skip

    rows = []
    for row in tokens:
        x = w["embedding.weight"][row]
        for i in range(3):
            p = f"layers.{i}."
            x = x + attention(norm(x, w[p + "attention_norm.weight"]), p + "attention.")
            x = x + feed_forward(norm(x, w[p + "feed_forward_norm.weight"]), p + "feed_forward.")
        rows.append(norm(x, w["norm.weight"]) @ model.head.weight.t())
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["debug", "debug_moe"])
def test_logits_equal_the_model_written_out(name):
    model = small(name)
    torch.testing.assert_close(logits_of(model), logits_written_out(model), rtol=1e-4, atol=1e-4)


HF_NAMES = [
    ("embedding.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("head.", "lm_head."),
    (".attention.out_proj", ".self_attn.o_proj"),
    (".attention.", ".self_attn."),
    (".attention_norm", ".input_layernorm"),
    (".feed_forward_norm", ".post_attention_layernorm"),
    (".feed_forward.router.gate", ".mlp.gate"),
    (".feed_forward.", ".mlp."),
]


def as_hugging_face(model):
    """The weights under the names of ``transformers``, which stacks gate and up of all experts in one tensor."""
    state, experts = {}, {}
    for name, parameter in model.named_parameters():
        for ours, theirs in HF_NAMES:
            if ours.startswith(".") or name.startswith(ours):
                name = name.replace(ours, theirs)
        name = "model.norm.weight" if name == "norm.weight" else name
        if ".experts." in name:
            experts[name.removesuffix(".weight")] = parameter
        else:
            state[name] = parameter
    for name, gate in experts.items():
        if name.endswith("gate_proj"):
            prefix = name.removesuffix("gate_proj")
            state[prefix + "gate_up_proj"] = torch.cat((gate, experts[prefix + "up_proj"]), 1)
            state[prefix + "down_proj"] = experts[prefix + "down_proj"]
    return state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["debug", "debug_moe"])
def test_logits_equal_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    model = small(name)
    config = model.config
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tied,
    }
    if isinstance(config.feed_forward, MoE.Config):
        theirs = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                moe_intermediate_size=40, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, **settings
            )
        )  # fmt: skip
    else:
        theirs = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(intermediate_size=40, **settings)
        )
    missing, unexpected = theirs.load_state_dict(as_hugging_face(model), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tied else [])
    theirs.tie_weights()
    tokens, positions = token_rows()
    want = theirs.eval()(input_ids=tokens, position_ids=positions).logits
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=1e-4)
