"""Hugging Face's mixtures of experts and the real GPTModel: the same logits, the same bits back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.errors import LayoutError, WeightsError
from tests.mcore import hf_models
from tests.mcore.hf_models import Layout
from tests.mcore.test_model import sum_of_squares_gradient
from tests.spawn import run_ranks

pytest.importorskip("transformers")

BOUND = 1e-5
LAYOUTS = {
    "one rank": Layout(),
    "TP 2, SP, expert-TP 1": Layout(tp=2, sequence_parallel=True, etp=1),
    "TP 2, SP, expert-TP 2": Layout(tp=2, sequence_parallel=True, etp=2),
    "EP 2": Layout(ep=2),
    "expert-TP 2 alone": Layout(etp=2),
    "PP 2": Layout(pp=2),
    "PP 2, EP 2": Layout(pp=2, ep=2),
    "TP 2, SP, EP 2": Layout(tp=2, sequence_parallel=True, ep=2),
}
NAMES = ["qwen3_moe", "mixtral"]


def per_expert(name: str) -> dict[str, Tensor]:
    """Returns the weights as a checkpoint holds them, by transformers' own converter."""
    from transformers.core_model_loading import revert_weight_conversion

    model = hf_models.hf_model(name)
    return dict(revert_weight_conversion(model, dict(model.state_dict())))


def check(name: str, layout: Layout, weights: dict[str, Tensor]) -> None:
    config = hf_models.hf_config(name).to_dict()
    results = run_ranks(hf_models.load_and_run, layout.world_size, layout, config, weights)
    shards = {_tp_rank(rank, layout): r.logits for rank, r in enumerate(results)
              if r.logits is not None}  # fmt: skip
    logits = torch.cat([shards[i] for i in range(layout.tp)], -1)[..., :100]
    assert hf_models.relative_error(logits, hf_models.hf_logits(name)) <= BOUND
    for result in results:
        assert result.names == results[0].names
        assert set(result.exported) == set(per_expert(name))
        for key, tensor in per_expert(name).items():
            assert torch.equal(result.exported[key], tensor), key


def _tp_rank(rank: int, layout: Layout) -> int:
    return rank % layout.tp


@pytest.mark.parametrize("layout", LAYOUTS)
def test_qwen3_moe_gives_hugging_faces_logits_and_its_bits_back(layout):
    check("qwen3_moe", LAYOUTS[layout], per_expert("qwen3_moe"))


@pytest.mark.parametrize("name", ["qwen3_moe unscaled", "mixtral"])
def test_other_routers_and_names_give_hugging_faces_logits_and_bits(name):
    check(name, LAYOUTS["EP 2"], per_expert(name))


@pytest.mark.parametrize("name", NAMES)
def test_experts_that_transformers_stacked_load_too(name):
    fused = dict(hf_models.hf_model(name).state_dict())
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in fused)
    check(name, LAYOUTS["EP 2"], fused)


@pytest.mark.parametrize(
    "layout", ["EP 2", "TP 2, SP, expert-TP 1", "TP 2, SP, expert-TP 2", "expert-TP 2 alone"]
)
def test_gradients_of_every_weight_equal_one_ranks(layout):
    config, weights = hf_models.hf_config("qwen3_moe").to_dict(), per_expert("qwen3_moe")
    one = run_ranks(sum_of_squares_gradient, 1, Layout(), config, weights)[0]
    two = run_ranks(sum_of_squares_gradient, 2, LAYOUTS[layout], config, weights)[0]
    assert set(one) == set(two) == set(weights)
    for name, gradient in one.items():
        assert gradient.norm() > 0, name
        assert hf_models.relative_error(two[name], gradient) <= BOUND, name


def round_trip(layout: Layout, config: Any, weights: Any, folder: str) -> None:
    """On a rank: loads, saves a checkpoint folder, and loads that into a fresh model."""
    from megatron_rl_loss.mcore.weights import (
        export_hf_weights,
        load_hf_weights,
        save_hf_checkpoint,
    )

    chunks, spec = hf_models.start(layout, config)
    try:
        load_hf_weights(chunks, weights, spec)
        before = dict(export_hf_weights(chunks, spec))
        save_hf_checkpoint(folder, chunks, spec, config)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(float("nan"))
        load_hf_weights(chunks, folder, spec)
        after = dict(export_hf_weights(chunks, spec))
        assert all(torch.equal(before[name], after[name]) for name in before)
    finally:
        hf_models.stop()


@pytest.mark.parametrize("name", NAMES)
def test_saved_checkpoint_of_ep_2_is_what_transformers_loads(name, tmp_path):
    from transformers import AutoModelForCausalLM

    config = hf_models.hf_config(name).to_dict()
    folder = str(tmp_path / "checkpoint")
    run_ranks(round_trip, 2, LAYOUTS["EP 2"], config, per_expert(name), folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(model(hf_models.tokens()).logits, hf_models.hf_logits(name))


def refused(layout: Layout, config: Any, weights: Any) -> str:
    from megatron_rl_loss.mcore.weights import load_hf_weights

    chunks, spec = hf_models.start(layout, config)
    try:
        before = [p.detach().clone() for p in chunks[0].parameters()]
        with pytest.raises(WeightsError) as caught:
            load_hf_weights(chunks, weights, spec)
        assert all(torch.equal(a, b) for a, b in zip(before, chunks[0].parameters(), strict=True))
        return str(caught.value)
    finally:
        hf_models.stop()


def test_missing_extra_and_misshapen_experts_are_named_on_every_rank():
    weights = per_expert("qwen3_moe")
    experts = "model.layers.1.mlp.experts."
    del weights[f"{experts}3.up_proj.weight"]
    weights[f"{experts}4.up_proj.weight"] = torch.zeros(32, 64)
    weights[f"{experts}0.down_proj.weight"] = weights[f"{experts}0.down_proj.weight"].t()
    config = hf_models.hf_config("qwen3_moe").to_dict()
    for message in run_ranks(refused, 2, LAYOUTS["EP 2"], config, weights):
        assert f"missing from the checkpoint: {experts}3.up_proj.weight" in message
        assert f"unexpected in the checkpoint: {experts}4.up_proj.weight" in message
        assert f"{experts}0.down_proj.weight has shape (32, 64)" in message


def test_stacked_experts_of_another_number_are_refused():
    weights = dict(hf_models.hf_model("qwen3_moe").state_dict())
    name = "model.layers.0.mlp.experts.down_proj"
    weights[name] = weights[name][:3]
    config = hf_models.hf_config("qwen3_moe").to_dict()
    (message,) = run_ranks(refused, 1, LAYOUTS["one rank"], config, weights)
    assert "missing from the checkpoint: model.layers.0.mlp.experts.3.down_proj.weight" in message


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("qwen3_moe", {"expert_model_parallel_size": 3}, "3 does not divide 4 experts"),
        ("qwen3_moe", {"expert_tensor_parallel_size": 5}, "5 does not divide 32 rows"),
        ("qwen3_moe", {"tensor_model_parallel_size": 2}, "needs sequence_parallel=True"),
        ("llama", {"expert_model_parallel_size": 2}, "llama has no experts"),
    ],
)
def test_layouts_that_cannot_hold_the_experts_are_refused(name, sizes, words):
    from megatron_rl_loss.mcore.model import transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf

    with pytest.raises(LayoutError, match=words):
        transformer_config(model_spec_from_hf(hf_models.hf_config(name)), **sizes)


def test_no_balancing_loss_unless_asked_for():
    from megatron_rl_loss.mcore.model import transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf

    spec = model_spec_from_hf(hf_models.hf_config("qwen3_moe"))
    off = transformer_config(spec)
    assert off.moe_router_load_balancing_type == "none" and not off.moe_aux_loss_coeff
    on = transformer_config(spec, moe_aux_loss_coef=0.01)
    assert on.moe_router_load_balancing_type == "aux_loss" and on.moe_aux_loss_coeff == 0.01
