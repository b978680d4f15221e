"""The real GPTModel gives the logits of Hugging Face's model in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, LayoutError
from tests.mcore import hf_models
from tests.mcore.hf_models import CONFIGS, Layout
from tests.spawn import run_ranks

pytest.importorskip("transformers")

BOUND = 1e-5
LAYOUTS = {
    "TP 2": Layout(tp=2),
    "TP 2 with sequence parallelism": Layout(tp=2, sequence_parallel=True),
    "PP 2": Layout(pp=2),
    "PP 2 with two chunks each": Layout(pp=2, vpp=2),
}


def check_logits(name: str, layout: Layout) -> list[Any]:
    results = hf_models.run_model(name, layout)
    error = hf_models.relative_error(hf_models.whole_logits(results), hf_models.hf_logits(name))
    assert error <= BOUND
    return results


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_hugging_face_on_one_rank(name):
    check_logits(name, Layout())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama3 rope", "llama tied", "qwen2", "qwen3 tied"])
def test_logits_equal_hugging_face_on_two_ranks(name, layout):
    check_logits(name, LAYOUTS[layout])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_logits_do_not_change_with_recomputation(recompute):
    check_logits("qwen3", Layout(config={"recompute": recompute}))


def sum_of_squares_gradient(layout: Layout, config: Any, weights: Any) -> dict[str, Any]:
    """On a rank: the reduced gradient of the logits' mean square, under Hugging Face names."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_rl_loss.mcore.optimizer import wrap_with_ddp
    from megatron_rl_loss.mcore.weights import export_hf_weights, load_hf_weights

    chunks, spec = hf_models.start(layout, config)
    try:
        load_hf_weights(chunks, weights, spec)
        chunks = wrap_with_ddp(chunks)
        batch = hf_models.tokens()
        positions = torch.arange(batch.shape[1]).expand_as(batch)
        logits = chunks[0](batch, positions, None)
        logits.square().mean().div(layout.tp).backward()
        finalize_model_grads(chunks)
        for parameter in chunks[0].parameters():
            parameter.data = parameter.main_grad
        return dict(export_hf_weights(chunks, spec))
    finally:
        hf_models.stop()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_norms_and_weights_are_the_same_under_tensor_parallelism(sequence_parallel):
    config = hf_models.hf_config("qwen3").to_dict()
    weights = dict(hf_models.hf_model("qwen3").state_dict())
    one = run_ranks(sum_of_squares_gradient, 1, Layout(), config, weights)[0]
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    two = run_ranks(sum_of_squares_gradient, 2, layout, config, weights)[0]
    assert set(one) == set(two) == set(weights)
    for name, gradient in one.items():
        assert gradient.norm() > 0, name
        assert hf_models.relative_error(two[name], gradient) <= BOUND, name


def error_of(layout: Layout, config: Any, sizes: dict[str, Any], build: dict[str, Any]) -> str:
    """On a rank: the error of building the model, where config and parallel state may differ."""
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf

    hf_models.start(layout, config)
    try:
        spec = model_spec_from_hf(config)
        build_gpt_model(spec, transformer_config(spec, **sizes), **build)
    except LayoutError as error:
        return str(error)
    finally:
        hf_models.stop()
    return "no error"


@pytest.mark.parametrize(
    ("sizes", "build", "words"),
    [
        ({"tensor_model_parallel_size": 2}, {}, ["tensor_model_parallel_size 2", "with 1"]),
        ({"pipeline_model_parallel_size": 2}, {}, ["pipeline_model_parallel_size 2", "with 1"]),
        ({}, {"padded_vocab_size": 99}, ["vocabulary (100)", "got 99"]),
    ],
)
def test_building_refuses_what_does_not_fit_the_ranks(sizes, build, words):
    config = hf_models.hf_config("llama").to_dict()
    (message,) = run_ranks(error_of, 1, Layout(), config, sizes, build)
    for word in words:
        assert word in message


def uninitialised_errors(config: Any) -> list[str]:
    from megatron.core import parallel_state, tensor_parallel

    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf

    spec = model_spec_from_hf(config)
    messages = []
    for initialise in (lambda: None, parallel_state.initialize_model_parallel):
        initialise()
        tensor_parallel.get_cuda_rng_tracker().reset()
        with pytest.raises(LayoutError) as caught:
            build_gpt_model(spec, transformer_config(spec))
        messages.append(str(caught.value))
    hf_models.stop()
    return messages


def test_building_without_parallel_state_or_seed_says_what_to_call():
    config = hf_models.hf_config("llama").to_dict()
    (messages,) = run_ranks(uninitialised_errors, 1, config)
    assert "initialize_model_parallel" in messages[0]
    assert "model_parallel_cuda_manual_seed" in messages[1]


def spec_of(name: str) -> Any:
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf

    return model_spec_from_hf(hf_models.hf_config(name))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"tensor_model_parallel_size": 8}, LayoutError, ["num_query_groups 4", "divisor of 4"]),
        ({"pipeline_model_parallel_size": 3}, LayoutError, ["4 layers", "3 pipeline chunks"]),
        ({"sequence_parallel": True}, LayoutError, ["tensor_model_parallel_size > 1"]),
        ({"bf16": True, "fp16": True}, ConfigError, ["bf16 and fp16"]),
        ({"recompute": "all"}, ConfigError, ["'all'", "selective"]),
        ({"hiden_dropout": 0.1}, ConfigError, ["'hiden_dropout'", "'hidden_dropout'"]),
    ],
)
def test_transformer_config_refuses_impossible_settings(settings, error, words):
    from megatron_rl_loss.mcore.model import transformer_config

    with pytest.raises(error) as caught:
        transformer_config(spec_of("llama"), **settings)
    for word in words:
        assert word in str(caught.value)


def test_transformer_config_takes_overrides_and_uneven_pipelines():
    from megatron_rl_loss.mcore.model import transformer_config

    config = transformer_config(
        spec_of("qwen2"),
        pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=1,
        hidden_dropout=0.25,
        bf16=True,
    )
    assert config.hidden_dropout == 0.25
    assert config.params_dtype is config.pipeline_dtype is torch.bfloat16
    assert config.add_qkv_bias and not config.qk_layernorm


@pytest.mark.parametrize(
    ("vocab", "tp", "expected"),
    [(100, 1, 128), (128, 1, 128), (129, 1, 256), (129, 2, 256), (257, 2, 512)],
)
def test_padded_vocab_size_is_the_next_multiple_that_every_shard_divides(vocab, tp, expected):
    from megatron_rl_loss.mcore.model import padded_vocab_size

    assert padded_vocab_size(vocab, tp) == expected


@pytest.mark.parametrize(("name", "rounding"), [("llama", 0), ("qwen2", 0), ("llama3 rope", 2e-7)])
def test_rotary_frequencies_equal_hugging_face(name, rounding):
    from megatron_rl_loss.mcore.model import rotary_inv_freq

    expected = hf_models.hf_model(name).model.rotary_emb.inv_freq
    torch.testing.assert_close(rotary_inv_freq(spec_of(name)), expected, rtol=rounding, atol=0)


def test_uneven_pipeline_gives_the_same_logits():
    layout = Layout(pp=2, config={"num_layers_in_first_pipeline_stage": 1})
    check_logits("qwen2 tied", layout)


def test_a_wider_padded_vocabulary_does_not_change_the_logits():
    check_logits("llama", replace(Layout(tp=2), padded_vocab=256))
