"""A Hugging Face configuration becomes a spec, or an error that names what is not supported."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_loss.errors import ConfigError
from megatron_rl_loss.mcore.model_spec import Llama3RopeScaling, ModelSpec, model_spec_from_hf

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def spec_of(**settings: Any) -> ModelSpec:
    return model_spec_from_hf({**BASE, **settings})


def test_every_size_and_switch_is_read():
    spec = spec_of(
        model_type="qwen3", head_dim=32, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True
    )
    assert spec == ModelSpec(
        architecture="qwen3",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=2,
        head_dim=32,
        vocab_size=100,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=None,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
    )


def test_architectures_differ_in_bias_norm_and_default_head_width():
    llama, qwen2, qwen3 = (spec_of(model_type=name) for name in ("llama", "qwen2", "qwen3"))
    assert (llama.qkv_bias, llama.qk_norm, llama.head_dim) == (False, False, 8)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 8)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_missing_key_value_heads_means_one_per_query_head():
    assert spec_of(num_key_value_heads=None).num_query_groups == 8


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": LLAMA3["rope_type"]}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_spelling_of_rotary_settings_mean_the_same(settings):
    spec = spec_of(**settings)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 128)


def test_rotary_scaling_without_original_length_takes_the_stated_context():
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert spec_of(rope_scaling=scaling).rope_scaling.original_max_position_embeddings == 512


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "mistral"}, ["'mistral'", "llama, qwen2, qwen3"]),
        ({"model_type": None}, ["None", "llama, qwen2, qwen3"]),
        ({"model_type": "qwen2_moe"}, ["'qwen2_moe'", "dense"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias=True", "False"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias=True"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "plain"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "default, llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["'linear'", "default, llama3"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["'dynamic'", "default, llama3"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, ["factor > 0", "None"]),
        ({"vocab_size": None}, ["vocab_size >= 1", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers >= 1", "0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (8)", "(3)"]),
        ({"head_dim": 7}, ["head_dim must be even", "7"]),
        ({"num_attention_heads": True}, ["num_attention_heads >= 1", "True"]),
        ({"rms_norm_eps": "abc"}, ["rms_norm_eps > 0", "'abc'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps > 0", "nan"]),
        ({"rope_theta": -1}, ["rope_theta > 0", "-1"]),
        ({"rope_theta": 0}, ["rope_theta > 0", "0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling must be one set", "'linear'"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters must be one set"]),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, ["factor > 0", "'8'"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, ["low_freq_factor < high"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings true or false", "'false'"]),
        ({"layer_types": 3}, ["layer_types must be a list", "3"]),
    ],
)
def test_unsupported_setting_is_refused_with_what_is_supported(settings, words):
    with pytest.raises(ConfigError) as caught:
        spec_of(**settings)
    for word in words:
        assert word in str(caught.value)


SLIDING = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    "settings",
    [
        {**SLIDING, "max_window_layers": 3},
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"] * 2},
    ],
)
def test_sliding_window_in_use_is_refused(settings):
    with pytest.raises(ConfigError, match="sliding_window"):
        spec_of(**settings)


def test_a_first_sliding_layer_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="max_window_layers must be an integer, got 'a'"):
        spec_of(**SLIDING, max_window_layers="a")


@pytest.mark.parametrize(
    "settings",
    [
        {**SLIDING, "use_sliding_window": False, "max_window_layers": 3},
        {**SLIDING, "max_window_layers": 4},
        {**SLIDING, "layer_types": ["full_attention"] * 4},
    ],
)
def test_sliding_window_that_no_layer_uses_is_fine(settings):
    assert spec_of(**settings).architecture == "qwen2"


def test_something_that_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"got list.*hf_model\.config"):
        model_spec_from_hf([1, 2])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_configuration_object_and_its_dict_give_the_same_spec(model_type):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**{**BASE, "model_type": model_type})
    assert model_spec_from_hf(config) == model_spec_from_hf(config.to_dict())
    assert model_spec_from_hf(config) == spec_of(model_type=model_type)
