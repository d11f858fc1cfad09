"""The Hugging Face side of families that are a `Decoder`: tensor names, and ``config.json`` both ways."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config.configurable import Problem
from torchtitan.config.differences import differences
from torchtitan.errors import ConfigError
from torchtitan.models.decoder import Decoder
from torchtitan.models.family import Family
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.feed_forward import FeedForward, SwiGLU
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.rope import RoPE
from torchtitan.models.layers.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RoPEScaling,
    YarnScaling,
)
from torchtitan.models.layers.router import Router
from torchtitan.models.mapping import Drop, Own, Rename, Rule, Stack
from torchtitan.models.model import Model

log = logging.getLogger(__name__)

_BLOCK, _THEIR_BLOCK = "layers.{layer}.", "model.layers.{layer}."
_EXPERTS = ("gate_proj", "up_proj", "down_proj")

DECODER_RULES: tuple[Rule | Drop | Own, ...] = (
    Rename("embedding.weight", "model.embed_tokens.weight"),
    Rename("norm.weight", "model.norm.weight"),
    Rename("head.weight", "lm_head.weight"),
    Rename(_BLOCK + "attention_norm.weight", _THEIR_BLOCK + "input_layernorm.weight"),
    Rename(_BLOCK + "feed_forward_norm.weight", _THEIR_BLOCK + "post_attention_layernorm.weight"),
    *(
        Rename(f"{_BLOCK}attention.{name}.{kind}", f"{_THEIR_BLOCK}self_attn.{name}.{kind}")
        for name in ("q_proj", "k_proj", "v_proj")
        for kind in ("weight", "bias")
    ),
    Rename(_BLOCK + "attention.q_norm.weight", _THEIR_BLOCK + "self_attn.q_norm.weight"),
    Rename(_BLOCK + "attention.k_norm.weight", _THEIR_BLOCK + "self_attn.k_norm.weight"),
    Rename(_BLOCK + "attention.out_proj.weight", _THEIR_BLOCK + "self_attn.o_proj.weight"),
    *(
        Rename(f"{_BLOCK}feed_forward.{name}.weight", f"{_THEIR_BLOCK}mlp.{name}.weight")
        for name in _EXPERTS
    ),
    Rename(_BLOCK + "feed_forward.router.gate.weight", _THEIR_BLOCK + "mlp.gate.weight"),
    *(
        Stack(
            f"{_BLOCK}feed_forward.experts.{name}.weight",
            f"{_THEIR_BLOCK}mlp.experts.{{entry}}.{name}.weight",
        )
        for name in _EXPERTS
    ),
    Own(_BLOCK + "feed_forward.router.expert_bias"),
    Drop(_THEIR_BLOCK + "self_attn.rotary_emb.inv_freq"),  # a table; old Llama files have it
)
"""Every layer that a `Decoder` can have; a model has tensors for those that its config asks for."""

_IGNORED = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "attention_dropout", "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "name_or_path",
    "_name_or_path", "is_llama_config", "rope_interleaved", "layer_types", "max_window_layers", "transformers.js_config",
})  # fmt: skip
"""Keys of config.json that do not change what a model computes, or only repeat other keys."""
_NOT_COMPUTED = (
    "init_std", "feed_forward.aux_loss", "feed_forward.matmul", "feed_forward.log_experts",
    "feed_forward.router.bias_rate",
)  # fmt: skip
"""Settings of training that config.json has no words for, and that a trained model does not need."""


@dataclass(kw_only=True)
class DecoderFamily(Family):
    """A family whose models are a `Decoder`.

    Attributes:
        model_type: see `Family`.
        architecture: name of the class that loads it in ``transformers``.
        qkv_bias: its queries, keys and values have biases.
        qk_norm: its heads' queries and keys are normalised.
        experts: its feed-forward layers have experts.
        window: how it says that attention is windowed: never, by ``sliding_window`` alone, or if ``use_sliding_window`` too.
        head_dim: features of a head where config.json does not say; None means hidden_size / num_attention_heads.
        constants: what its config.json says beside that, in every model.
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    window: Literal["never", "size", "switch"] = "never"
    head_dim: int | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)

    def rules(self) -> Sequence[Rule | Drop | Own]:
        """See `Family.rules`."""
        return DECODER_RULES

    def to_hf(self, config: Model.Config) -> dict[str, Any]:
        """See `Family.to_hf`."""
        if not isinstance(config, Decoder.Config):
            raise ConfigError(
                f"model is a {type(config).__qualname__}, but {self.model_type} is a Decoder; use another hf_model_type"
            )
        hf = self._written(config)
        back = self.from_hf(hf)
        lost = [
            d
            for d in differences(config, back)
            if d.changes_mathematics and not d.path.startswith(_NOT_COMPUTED)
            and not (d.path == "attention.head_dim" and d.old is None)
            and not (d.path == "attention.n_kv_heads" and d.old is None)
        ]  # fmt: skip
        if lost:
            listed = "".join(f"\n  model.{d.path}={d.old!r}: it would be read as {d.new!r}" for d in lost)  # fmt: skip
            raise ConfigError(
                f"a {self.model_type} config.json has no words for this model; choose another hf_model_type or change:{listed}"
            )
        return hf

    def from_hf(self, hf: Mapping[str, Any]) -> Decoder.Config:
        """See `Family.from_hf`."""
        reader = _Reader(hf)
        heads = reader.number("num_attention_heads")
        dim = reader.number("hidden_size")
        kv_heads = reader.number("num_key_value_heads", default=heads)
        head_dim = reader.number("head_dim", default=self.head_dim or dim // max(1, heads))
        norm = RMSNorm.Config(eps=reader.real("rms_norm_eps"))
        feed_forward, dense_layers, dense = self._read_feed_forward(reader)
        config = Decoder.Config(
            vocab_size=reader.number("vocab_size"),
            dim=dim,
            n_layers=reader.number("num_hidden_layers"),
            attention=GQA.Config(
                n_heads=heads,
                n_kv_heads=kv_heads,
                head_dim=head_dim,
                qkv_bias=self.qkv_bias,
                window=self._read_window(reader),
                qk_norm=RMSNorm.Config(eps=norm.eps) if self.qk_norm else None,
            ),
            feed_forward=feed_forward,
            first_k_dense=dense_layers,
            dense_feed_forward=dense,
            norm=norm,
            rope=reader.rope(),
            tied=reader.get("tie_word_embeddings", False),
            hf_model_type=self.model_type,
            context_length=reader.get("max_position_embeddings", None),
            init_std=reader.real("initializer_range", default=0.02),
        )
        reader.must_be("hidden_act", "silu")
        for key, value in self.constants.items():
            reader.must_be(key, value)
        if hf.get("quantization_config"):
            reader.refuse("quantization_config", "quantised weights are not read", "dequantise the folder first")  # fmt: skip
        if hf.get("partial_rotary_factor", 1.0) != 1.0:
            reader.refuse("partial_rotary_factor", "is not supported", "only 1.0 is")
        reader.finish(self.model_type, self.constants)
        return config

    def _written(self, config: Decoder.Config) -> dict[str, Any]:
        """The model as config.json; what it has no words for is left out."""
        attention, hf = config.attention, dict[str, Any]()
        hf["architectures"] = [self.architecture]
        hf["model_type"] = self.model_type
        hf["vocab_size"] = config.vocab_size
        hf["hidden_size"] = config.dim
        hf["num_hidden_layers"] = config.n_layers
        hf["num_attention_heads"] = attention.n_heads
        hf["num_key_value_heads"] = attention.n_kv_heads or attention.n_heads
        hf["head_dim"] = attention.resolved_head_dim(config.dim)
        hf["hidden_act"] = "silu"
        hf["rms_norm_eps"] = config.norm.eps
        hf["tie_word_embeddings"] = config.tied
        hf["initializer_range"] = config.init_std
        if config.context_length is not None:
            hf["max_position_embeddings"] = config.context_length
        hf |= _rope_to_hf(config.rope)
        hf |= self._write_feed_forward(config)
        if self.window != "never":
            hf["sliding_window"] = attention.window
        if self.window == "switch":
            hf["use_sliding_window"] = attention.window is not None
            hf["max_window_layers"] = 0 if attention.window is not None else config.n_layers
        return hf | dict(self.constants)

    def _write_feed_forward(self, config: Decoder.Config) -> dict[str, Any]:
        layer, dense = config.feed_forward, config.dense_feed_forward
        if isinstance(layer, SwiGLU.Config):
            return {"intermediate_size": layer.ffn_dim}
        if not isinstance(layer, MoE.Config) or not self.experts:
            raise ConfigError(
                f"model.feed_forward={type(layer).__qualname__}: a {self.model_type} model has no such layer; choose another "
                "hf_model_type"
            )
        return {
            "intermediate_size": dense.ffn_dim if dense else layer.ffn_dim,
            "moe_intermediate_size": layer.ffn_dim,
            "num_experts": layer.n_experts,
            "num_experts_per_tok": layer.router.top_k,
            "norm_topk_prob": layer.router.normalize,
            "mlp_only_layers": list(range(config.first_k_dense)),
        }

    def _read_feed_forward(
        self, reader: "_Reader"
    ) -> tuple[FeedForward.Config, int, SwiGLU.Config | None]:
        dense = SwiGLU.Config(ffn_dim=reader.number("intermediate_size"))
        if not self.experts:
            return dense, 0, None
        only_dense = reader.get("mlp_only_layers", None) or []
        if only_dense != list(range(len(only_dense))):
            reader.refuse("mlp_only_layers", "are not the first layers", "only those can be dense")
        n_experts = reader.number("num_local_experts" if "num_local_experts" in reader.hf else "num_experts")  # fmt: skip
        layer = MoE.Config(
            n_experts=n_experts,
            ffn_dim=reader.number("moe_intermediate_size"),
            router=Router.Config(
                top_k=reader.number("num_experts_per_tok"),
                score="softmax",
                normalize=reader.get("norm_topk_prob", False),
            ),
        )
        return layer, len(only_dense), dense if only_dense else None

    def _read_window(self, reader: "_Reader") -> int | None:
        if self.window == "never":
            return None
        window = reader.get("sliding_window", 4096)  # what it is in transformers if absent
        if self.window == "size":
            return window
        used, unwindowed = (
            reader.get("use_sliding_window", False),
            # Of layers with experts all have the window there.
            0 if self.experts else reader.get("max_window_layers", 28),
        )
        if not used:
            return None
        n_layers = reader.number("num_hidden_layers")
        kinds = reader.get("layer_types", None) or [
            "full_attention" if i < unwindowed else "sliding_attention" for i in range(n_layers)
        ]
        if len(set(kinds)) > 1:
            key = "layer_types" if reader.hf.get("layer_types") else "max_window_layers"
            reader.refuse(key, "leaves some layers without a window", "all layers are alike here")
        return window if kinds[0] == "sliding_attention" else None


class _Reader:
    """Takes keys from a config.json, and collects what is wrong with them."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf = hf
        self.problems: list[Problem] = []
        self.used: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        self.used.add(key)
        return self.hf.get(key, default)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, None)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.refuse(key, "is missing" if value is None else "is not a positive whole number", "add it")  # fmt: skip
        return 1

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self.refuse(key, "is missing" if value is None else "is not a number", "add it")
        return 1e-5

    def must_be(self, key: str, wanted: Any) -> None:
        if self.get(key, wanted) != wanted:
            self.refuse(key, "is not supported", f"only {wanted!r} is")

    def refuse(self, key: str, reason: str, remedy: str) -> None:
        self.used.add(key)
        self.problems.append(Problem(key, self.hf.get(key), reason, remedy))

    def rope(self) -> RoPE.Config:
        """From ``rope_theta`` and ``rope_scaling``, or (transformers 5) from both in ``rope_parameters``."""
        self.used |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
        settings = dict(self.hf.get("rope_scaling") or self.hf.get("rope_parameters") or {})
        theta = settings.pop("rope_theta", self.hf.get("rope_theta", 10_000.0))
        kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
        settings.pop("type", None)
        if settings.pop("partial_rotary_factor", 1.0) != 1.0:
            self.refuse("rope_parameters", "turn a part of the features only", "all must be turned")
        scaling = None if kind == "default" else self._scaling(kind, settings)
        return RoPE.Config(theta=float(theta), scaling=scaling)

    def _scaling(self, kind: str, settings: dict[str, Any]) -> RoPEScaling.Config | None:
        if kind not in _SCALINGS:
            self.refuse(
                "rope_scaling", f"rope_type={kind!r} is not supported", f"it must be one of {sorted(_SCALINGS)}"
            )  # fmt: skip
            return None
        if kind == "yarn":
            settings = _with_yarn_defaults(settings, self.hf.get("max_position_embeddings"))
        names = _SCALING_FIELDS[kind]
        if unknown := settings.keys() - names.keys():
            self.refuse("rope_scaling", f"has settings that {kind} has not: {sorted(unknown)}", "remove them")  # fmt: skip
        required = {"factor"} if kind == "linear" else {"factor", _ORIGINAL}
        if missing := required - settings.keys():
            self.refuse("rope_scaling", f"lacks {sorted(missing)}", "add it")
            return None
        values = {names[key]: value for key, value in settings.items() if key in names}
        whole = {"original_context", "truncate", "attention_factor"}
        return _SCALINGS[kind](**{k: v if k in whole else float(v) for k, v in values.items()})

    def finish(self, model_type: str, constants: Iterable[str]) -> None:
        """Raise what was collected, and tell of keys that nobody asked for."""
        if self.problems:
            listed = "".join(f"\n  {problem}" for problem in self.problems)
            raise ConfigError(f"config.json of a {model_type} model cannot be used:{listed}")
        unknown: Collection[str] = self.hf.keys() - self.used - _IGNORED - set(constants)
        if unknown:
            log.warning(
                "config.json has keys that are not known here and were ignored: %s",
                ", ".join(f"{key}={self.hf[key]!r}" for key in sorted(unknown)),
            )


_SCALINGS: dict[str, type[RoPEScaling.Config]] = {
    "linear": LinearScaling.Config,
    "llama3": Llama3Scaling.Config,
    "yarn": YarnScaling.Config,
}
_ORIGINAL = "original_max_position_embeddings"
_SCALING_FIELDS: dict[str, dict[str, str]] = {  # kind -> their name -> ours
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        _ORIGINAL: "original_context",
    },
    "yarn": {
        "factor": "factor",
        _ORIGINAL: "original_context",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}


def _rope_to_hf(rope: RoPE.Config) -> dict[str, Any]:
    """Under the names that all versions of ``transformers`` read."""
    hf: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.scaling is None:
        return hf
    kind = next(name for name, config in _SCALINGS.items() if type(rope.scaling) is config)
    fields = {theirs: getattr(rope.scaling, ours) for theirs, ours in _SCALING_FIELDS[kind].items()}
    stated = {key: value for key, value in fields.items() if value is not None}
    hf["rope_scaling"] = {"rope_type": kind, **stated}
    return hf


def _with_yarn_defaults(settings: dict[str, Any], context: int | None) -> dict[str, Any]:
    """YaRN's settings with what ``transformers`` derives where it is not stated."""
    settings = {key: value for key, value in settings.items() if value is not None}
    if _ORIGINAL not in settings and context is not None:
        settings[_ORIGINAL] = context
    if "factor" not in settings and context is not None:
        settings["factor"] = context / settings[_ORIGINAL]
    mscale, over_all = settings.pop("mscale", None), settings.pop("mscale_all_dim", None)
    if "attention_factor" not in settings and mscale and over_all:
        plain = YarnScaling.Config(factor=settings["factor"], original_context=1).magnitude() - 1
        settings["attention_factor"] = (mscale * plain + 1) / (over_all * plain + 1)
    return settings
