from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_loss.errors import ConfigError
from megatron_rl_loss.losses.contract_check import check_loss
from megatron_rl_loss.losses.objective import is_of_set
from megatron_rl_loss.losses.presets import PRESETS, preset, preset_objective
from megatron_rl_loss.losses.registry import LOSSES
from megatron_rl_loss.ops.advantages import group_advantages
from megatron_rl_loss.ops.reduction import check_reduction

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_loss_table.py"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_an_objective(name):
    objective = preset_objective(name)
    assert objective.loss == PRESETS[name]["loss"]
    check_reduction(PRESETS[name]["reduction"], max_seq_len=8)


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p["advantages"]])
def test_every_preset_names_an_advantage_estimator(name):
    settings = dict(PRESETS[name]["advantages"])
    if settings["estimator"] == "opo":
        settings["num_tokens"] = torch.arange(1, 9)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0])
    got = group_advantages(rewards, torch.zeros(8, dtype=torch.long), **settings)
    assert got.shape == (8,) and got.any()


def test_every_loss_has_a_preset_of_its_own_name():
    for name in LOSSES:
        assert PRESETS[name]["loss"] == name


def test_presets_are_copies():
    preset("dapo")["loss_settings"]["clip_ratio_high"] = 0.5
    assert PRESETS["dapo"]["loss_settings"]["clip_ratio_high"] == 0.28


def test_published_defaults():
    assert preset_objective("gspo").spec.settings == {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
    }
    assert preset_objective("dapo").loss_settings["clip_ratio_high"] == 0.28
    assert preset_objective("grpo").kl_coef == 0.04
    assert PRESETS["dr_grpo"]["reduction"] == "seq_mean_token_sum_norm"
    for name in ("tinker_ppo", "tinker_cispo", "tinker_dro", "tinker_importance_sampling"):
        assert PRESETS[name]["reduction"] == "sum"


def test_unknown_presets_are_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="known: ppo_clip"):
        preset_objective("grop")


def test_changes_replace_fields():
    assert preset_objective("grpo", kl_coef=0.0).kl_coef == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_states_its_formula_and_is_short(name):
    fn = LOSSES[name].fn
    assert "Formula: " in inspect.getdoc(fn)
    body = inspect.getsource(fn).split('"""')[-1]
    assert len(body.splitlines()) < 25


def test_the_table_and_the_configs_are_current():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_docs_keeps_the_contract():
    text = (ROOT / "docs" / "losses.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(example, names)
    assert check_loss(names["my_loss"], strength=2.0).homogeneous


@pytest.mark.parametrize("name", PRESETS)
def test_config_files_hold_the_preset(name):
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / "configs" / "loss" / f"{name}.yaml").read_text())
    want = PRESETS[name]
    assert config["loss"]["name"] == want["loss"]
    assert config["loss"]["reduction"] == want["reduction"]
    for key, value in want["loss_settings"].items():
        assert config["loss"]["settings"][key] == value
    assert config["loss"].get("off_policy") == want.get("off_policy")
    assert config["advantage"] == (want["advantages"] or {"estimator": "none"})


@pytest.mark.parametrize("name", PRESETS)
def test_no_objective_waits_for_a_value_of_the_device(name):
    """A tensor on the meta device has no values: reading one raises."""
    objective = preset_objective(name, entropy_coef=0.1, entropy_max=2.0)
    shape = (2, 5)
    tensors = {
        need: torch.zeros((*shape, 3) if is_of_set(need) else shape, device="meta")
        for need in objective.needs
    }
    mask = torch.ones(shape, dtype=torch.bool, device="meta")
    log_probs, entropy = (torch.zeros(shape, device="meta", requires_grad=True) for _ in range(2))
    tokens = torch.zeros(*shape, 3, device="meta", requires_grad=True)
    loss, _ = objective(log_probs, entropy, tensors, mask, mask.float(), token_log_probs=tokens)
    loss.backward()
    learned = tokens if objective.spec.reads_token_set else log_probs
    assert learned.grad.shape == learned.shape
