"""Tiny models of every family, here and in transformers, for tests of the exchange with Hugging Face folders."""

import json
from pathlib import Path

import torch

from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.folder import read_model
from torchtitan.checkpoint.hugging_face.loading import load_weights
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles

VOCAB = 97
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0,
        "mscale": 1.5, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
KINDS = {
    "llama3": ("llama", {"rope_parameters": {"rope_theta": 500.0, **SCALINGS["llama3"]}}),
    "llama3_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral_nemo": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 24, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3_moe_dense_first": (
        "qwen3_moe",
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
}  # fmt: skip
"""Name -> model_type, and what of its config is not that of `settings`."""


def settings(**changes):
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        **changes,
    }


def theirs(kind, **changes):
    """A model of transformers with random weights, none of them trivial."""
    import transformers  # noqa: PLC0415 - slow, and not always installed

    model_type, own = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **settings(**own | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(1 + value if "norm" in name else value)
    return model.eval()


def ours(folder: Path):
    """The model in a folder, loaded."""
    family, config = read_model(folder)
    model = config.build()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(float("nan"))
    load_weights(WeightFiles(folder), family.layout(config), model, Agreement())
    return model


def logits_of(model, tokens, positions=None, document_ids=None):
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, document_ids) @ model.head.weight.t()


def rows(n_rows=2, seq_len=40, seed=0):
    return torch.randint(VOCAB, (n_rows, seq_len), generator=torch.Generator().manual_seed(seed))


def edit_config(folder: Path, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
