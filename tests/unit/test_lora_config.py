"""LoRA settings and first values, without any model."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_rl_loss.errors import ConfigError  # noqa: E402
from megatron_rl_loss.lora import LoRAConfig, refusals  # noqa: E402
from megatron_rl_loss.lora.init import initial_a  # noqa: E402
from megatron_rl_loss.lora.names import Linear  # noqa: E402


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


class GroupedMLP(torch.nn.Module):
    """Named as Megatron's packed experts."""


def test_packed_experts_are_refused():
    model = torch.nn.Module()
    model.config = SimpleNamespace()
    model.experts = GroupedMLP()
    with pytest.raises(ConfigError, match="experts is Megatron's GroupedMLP.*SequentialMLP"):
        refusals.check_model([model])


QKV = "decoder.layers.0.self_attention.linear_qkv"
SHARED = "decoder.layers.0.mlp.shared_experts.linear_fc1"


@pytest.mark.parametrize(
    ("name", "kind", "settings", "words"),
    [
        (QKV, "qkv", {}, "4 is larger than num_query_groups 2.*at most 2"),
        (
            SHARED,
            "gate_up",
            {"moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap is on.*Set it to False",
        ),
        ("decoder.layers.0.x", "column", {"gather_output": True}, "gathers its output"),
        ("decoder.layers.0.x", "row", {"input_is_parallel": False}, "splits its input"),
        ("decoder.layers.0.x", "column", {}, None),
        ("decoder.layers.0.x", "row", {}, None),
    ],
)
def test_layers_that_communicate_in_another_way_are_refused(
    name, kind, settings, words, monkeypatch
):
    monkeypatch.setattr(refusals.parallel_state, "get_tensor_model_parallel_world_size", lambda: 4)
    config = SimpleNamespace(num_query_groups=2, moe_shared_expert_overlap=False)
    module = SimpleNamespace(config=config)
    for key, value in settings.items():
        setattr(config if hasattr(config, key) else module, key, value)
    problems = list(refusals.check_target(Linear(name, module, kind), LoRAConfig(4, 8.0)))
    if words is None:
        assert not problems
    else:
        assert len(problems) == 1 and re.search(words, problems[0]), problems


def test_a_grouped_layer_takes_adapters_for_all_experts_or_none():
    module = SimpleNamespace()
    found = [Linear(f"decoder.layers.0.e.{i}", module, "column", i, i) for i in range(3)]
    assert refusals.check_grouped(found, found) == refusals.check_grouped(found, []) == []
    assert "decoder.layers.0.e.1" in refusals.check_grouped(found, found[::2])[0]
