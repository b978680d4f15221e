"""LoRA settings and first values, without any model."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_rl_loss.errors import ConfigError  # noqa: E402
from megatron_rl_loss.lora import LoRAConfig  # noqa: E402
from megatron_rl_loss.lora.init import initial_a  # noqa: E402


def test_the_scale_is_alpha_over_rank_or_its_root_and_ignores_expert_rank():
    assert LoRAConfig(rank=4, alpha=8).scale == 2.0
    assert LoRAConfig(rank=4, alpha=8, expert_rank=2).scale == 2.0
    assert LoRAConfig(rank=4, alpha=8, use_rslora=True).scale == 4.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "lora.rank.*at least 1.*0"),
        ({"rank": 2.0}, "lora.rank.*integer"),
        ({"rank": True}, "lora.rank"),
        ({"expert_rank": -1}, "lora.expert_rank.*-1"),
        ({"alpha": 0.0}, "lora.alpha.*positive"),
        ({"alpha": math.inf}, "lora.alpha.*finite"),
        ({"targets": "attn"}, "attention, all-linear.*'attn'"),
        ({"targets": []}, "lora.targets is empty"),
        ({"exclude": "linear_qkv"}, "lora.exclude must be a list"),
        ({"init": "gauss"}, "kaiming, xavier.*'gauss'"),
        ({"dropout": 0.1}, "lora.dropout must be 0"),
    ],
)
def test_a_bad_setting_says_what_is_allowed(settings, words):
    with pytest.raises(ConfigError, match=words):
        LoRAConfig(**{"rank": 4, "alpha": 8.0} | settings)


@pytest.mark.parametrize("init", ["kaiming", "xavier"])
def test_first_values_depend_on_seed_and_name_and_stay_in_bounds(init):
    a = initial_a("decoder.layers.0.x", (8, 64), init=init, seed=0)
    bound = 1 / 8 if init == "kaiming" else math.sqrt(6 / 72)
    assert a.shape == (8, 64) and a.abs().max() <= bound
    assert a.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert torch.equal(a, initial_a("decoder.layers.0.x", (8, 64), init=init, seed=0))
    assert not torch.equal(a, initial_a("decoder.layers.0.x", (8, 64), init=init, seed=1))
    assert not torch.equal(a, initial_a("decoder.layers.1.x", (8, 64), init=init, seed=0))
