"""The architecture of a model, read from its Hugging Face configuration.

`ModelSpec` names what the model builder and the weight conversion need, and nothing else. A
configuration that asks for anything these do not do is refused here, never silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

DENSE_ARCHITECTURES = ("llama", "qwen2", "qwen3")
MOE_ARCHITECTURES = ("qwen3_moe", "mixtral")
SUPPORTED_ARCHITECTURES = DENSE_ARCHITECTURES + MOE_ARCHITECTURES
SUPPORTED_ROPE_TYPES = ("default", "llama3")

_QWEN3_HEAD_DIM = 128  # the class default of Hugging Face's Qwen3Config, which has no derived one


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's stretch of the low rotary frequencies.

    Attributes:
        factor: by which low frequencies are divided.
        low_freq_factor, high_freq_factor: where the smooth transition starts and ends.
        original_max_position_embeddings: context length before the stretch, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class MoESpec:
    """The mixture of experts that every layer has in place of its MLP.

    Attributes:
        num_experts: in a layer.
        top_k: experts that a token goes to.
        ffn_hidden_size: width of one expert.
        norm_topk_prob: the chosen experts' probabilities are scaled to a sum of 1; else they are
            those of a softmax over all experts.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    norm_topk_prob: bool


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of a decoder with RMSNorm, rotary embeddings and SwiGLU MLPs or experts.

    Attributes:
        architecture: one of `SUPPORTED_ARCHITECTURES`, Hugging Face's `model_type`.
        num_layers, hidden_size, ffn_hidden_size: sizes of the decoder.
        num_attention_heads, num_query_groups: query heads, and key / value heads.
        head_dim: width of one head; need not be hidden_size / num_attention_heads.
        vocab_size: rows of the embedding in the checkpoint, before any padding.
        max_position_embeddings: longest context the checkpoint states, in tokens.
        rms_norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3's scaling, or None.
        tied_embeddings: the output layer is the embedding.
        qkv_bias: the query, key and value projections have a bias (Qwen2).
        qk_norm: RMSNorm over each query and key head (Qwen3).
        moe: the experts of every layer; None: a dense model.
        value_head: a critic: one value per token in place of logits (see `value_model`).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoESpec | None = None
    value_head: bool = False


def model_spec_from_hf(hf_config: Any) -> ModelSpec:
    """Returns the architecture that a Hugging Face configuration describes.

    Args:
        hf_config: a `transformers` configuration object, or the dict read from a `config.json`;
            both transformers 4's spelling (`rope_theta`, `rope_scaling`) and 5's
            (`rope_parameters`) are read.

    Raises:
        ConfigError: the architecture or one of its settings is not supported, or a size is
            missing or impossible; the message names the setting and what is supported.

    >>> model_spec_from_hf({
    ...     "model_type": "qwen3", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ... }).head_dim
    128
    """
    config = _as_dict(hf_config)
    architecture = _architecture(config)
    _check_supported(config, architecture)
    num_heads = _size(config, "num_attention_heads")
    spec = ModelSpec(
        architecture=architecture,
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=_size(config, "hidden_size"),
        ffn_hidden_size=_size(config, "intermediate_size"),
        num_attention_heads=num_heads,
        num_query_groups=_size(config, "num_key_value_heads", default=num_heads),
        head_dim=_head_dim(config, architecture, num_heads),
        vocab_size=_size(config, "vocab_size"),
        max_position_embeddings=_size(config, "max_position_embeddings", default=32_768),
        rms_norm_eps=float(_positive(config, "rms_norm_eps", 1e-6)),
        rope_theta=float(_positive(_rope_parameters(config), "rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(config),
        tied_embeddings=_switch(config, "tie_word_embeddings"),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        moe=_moe(config, architecture),
    )
    _check_heads(spec)
    return spec


def _as_dict(hf_config: Any) -> Mapping[str, Any]:
    if isinstance(hf_config, Mapping):
        return hf_config
    if hasattr(hf_config, "to_dict"):
        return hf_config.to_dict()
    raise ConfigError(
        f"expected a Hugging Face configuration object or a dict, got {type(hf_config).__name__}. "
        "Pass hf_model.config, or json.load of the checkpoint's config.json."
    )


def _architecture(config: Mapping[str, Any]) -> str:
    name = config.get("model_type")
    if name not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"model_type {name!r} is not supported; supported: "
            f"{', '.join(DENSE_ARCHITECTURES)} (dense), {', '.join(MOE_ARCHITECTURES)} (experts). "
            "Choose a checkpoint of one of these."
        )
    return name


def _check_supported(config: Mapping[str, Any], architecture: str) -> None:
    """Raises on every setting that would change the model's output unseen."""
    refusals = {
        "hidden_act": (config.get("hidden_act", "silu") != "silu", "'silu'"),
        # Qwen2's query, key and value biases are part of the architecture, not of this switch
        "attention_bias": (bool(config.get("attention_bias")) and architecture != "qwen2", "False"),
        "mlp_bias": (bool(config.get("mlp_bias")), "False"),
        "attention_dropout": (bool(config.get("attention_dropout")), "0.0"),
        "sliding_window": (_uses_sliding_window(config), "full attention in every layer"),
        "mlp_only_layers": (bool(config.get("mlp_only_layers")), "experts in every layer"),
        "decoder_sparse_step": (
            config.get("decoder_sparse_step", 1) != 1,
            "1, experts in every layer",
        ),
        "router_jitter_noise": (bool(config.get("router_jitter_noise")), "0.0"),
        "quantization_config": (bool(config.get("quantization_config")), "none: plain weights"),
    }
    for name, (refused, supported) in refusals.items():
        if refused:
            raise ConfigError(
                f"{architecture} with {name}={config.get(name)!r} is not supported; supported: "
                f"{supported}."
            )


def _moe(config: Mapping[str, Any], architecture: str) -> MoESpec | None:
    if architecture not in MOE_ARCHITECTURES:
        return None
    # transformers 4 and 5 spell Qwen3's number of experts differently
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    width = "intermediate_size" if architecture == "mixtral" else "moe_intermediate_size"
    moe = MoESpec(
        num_experts=_size(config, name),
        top_k=_size(config, "num_experts_per_tok"),
        ffn_hidden_size=_size(config, width),
        norm_topk_prob=architecture == "mixtral" or _switch(config, "norm_topk_prob"),
    )
    if moe.top_k > moe.num_experts:
        raise ConfigError(
            f"num_experts_per_tok ({moe.top_k}) is larger than {name} ({moe.num_experts})."
        )
    return moe


def _uses_sliding_window(config: Mapping[str, Any]) -> bool:
    layer_types = config.get("layer_types")
    if layer_types:
        if not isinstance(layer_types, (list, tuple)):
            raise ConfigError(f"layer_types must be a list with a name per layer: {layer_types!r}.")
        return any(layer_type != "full_attention" for layer_type in layer_types)
    # transformers 4 spells it by the first layer that slides
    on = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    first = config.get("max_window_layers", 0)
    if on and type(first) is not int:
        raise ConfigError(f"max_window_layers must be an integer, got {first!r}.")
    return on and first < _size(config, "num_hidden_layers")


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings in transformers 5's spelling."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name) or {}
    if not isinstance(given, Mapping) or any(isinstance(x, Mapping) for x in given.values()):
        raise ConfigError(
            f"{name} must be one set of rotary settings for all layers, got {given!r}."
        )
    settings = dict(given)
    settings.setdefault("rope_theta", config.get("rope_theta"))
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    return settings


def _rope_scaling(config: Mapping[str, Any]) -> Llama3RopeScaling | None:
    settings = _rope_parameters(config)
    if settings["rope_type"] not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"rope_type {settings['rope_type']!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}."
        )
    if settings["partial_rotary_factor"] not in (None, 1, 1.0):
        raise ConfigError(
            f"partial_rotary_factor {settings['partial_rotary_factor']} is not supported; "
            "supported: 1.0 (the whole head is rotated)."
        )
    if settings["rope_type"] == "default":
        return None
    settings.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    names = Llama3RopeScaling.__dataclass_fields__
    scaling = Llama3RopeScaling(**{name: _positive(settings, name) for name in names})
    if not scaling.low_freq_factor < scaling.high_freq_factor:
        raise ConfigError(
            f"llama3 rope scaling needs low_freq_factor < high_freq_factor, got "
            f"{scaling.low_freq_factor} and {scaling.high_freq_factor}."
        )
    return scaling


def _head_dim(config: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    if architecture == "qwen3":  # Qwen3-MoE's class has the usual default
        return _size(config, "head_dim", default=_QWEN3_HEAD_DIM)
    return _size(config, "head_dim", default=_size(config, "hidden_size") // num_heads)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise ConfigError(f"the Hugging Face configuration needs {name} >= 1, got {value!r}.")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    value = config.get(name)
    if value is None:
        value = default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(f"the Hugging Face configuration needs {name} > 0, got {value!r}.")
    return value


def _switch(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, True, False):
        raise ConfigError(f"the Hugging Face configuration needs {name} true or false: {value!r}.")
    return bool(value)


def _check_heads(spec: ModelSpec) -> None:
    if spec.num_attention_heads % spec.num_query_groups:
        raise ConfigError(
            f"num_attention_heads ({spec.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({spec.num_query_groups})."
        )
    if spec.head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary embeddings, got {spec.head_dim}.")
