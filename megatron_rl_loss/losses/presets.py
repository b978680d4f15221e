"""Named recipes: a loss, its settings, the reduction and the advantages that belong together.

A preset is a plain dict:

    loss            name in `LOSSES`
    loss_settings   its settings; those not given have the loss's defaults
    reduction       token weights, `ops.reduction.REDUCTIONS`
    advantages      {"estimator": name in `ADVANTAGE_ESTIMATORS`, **settings}; None: from elsewhere
    kl_coef, kl_estimator, kl_is_weighted, entropy_coef, entropy_max, off_policy
                    of `Objective`, where they are not its defaults
"""

from __future__ import annotations

import copy
from typing import Any

from ..errors import ConfigError
from .objective import Objective

GRPO = {"estimator": "grpo"}
DR_GRPO = {"estimator": "dr_grpo"}
_OBJECTIVE_FIELDS = tuple(Objective.__dataclass_fields__)

Preset = dict[str, Any]


def _recipe(
    loss: str,
    reduction: str = "token_mean",
    advantages: dict[str, Any] | None = GRPO,
    settings: dict[str, Any] | None = None,
    **terms: Any,
) -> Preset:
    return {
        "loss": loss,
        "loss_settings": settings or {},
        "reduction": reduction,
        "advantages": advantages,
        **terms,
    }


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high}


PRESETS: dict[str, Preset] = {
    # the losses by themselves
    "ppo_clip": _recipe("ppo_clip"),
    "dual_clip": _recipe("dual_clip"),
    "policy_gradient": _recipe("policy_gradient"),
    "importance_sampling": _recipe("importance_sampling"),
    "cispo": _recipe("cispo"),
    "sapo": _recipe("sapo", "sequence_mean"),
    "dro": _recipe("dro", settings={"beta": 0.05}),
    "dppo_tv": _recipe("dppo_tv"),
    "dppo_kl": _recipe("dppo_kl"),
    "gspo": _recipe("gspo", "sequence_mean"),
    "gspo_token": _recipe("gspo_token", "sequence_mean"),
    "gmpo": _recipe("gmpo", "sequence_mean"),
    "topr": _recipe("topr", "seq_mean_token_sum_norm", DR_GRPO),
    "clip_cov": _recipe("clip_cov"),
    "kl_cov": _recipe("kl_cov"),
    "on_policy_distillation": _recipe("on_policy_distillation", advantages=None),
    "top_k_distillation": _recipe("top_k_distillation", advantages=None),
    "cross_entropy": _recipe("cross_entropy", advantages=None),
    "tinker_importance_sampling": _recipe("tinker_importance_sampling", "sum", DR_GRPO),
    "tinker_ppo": _recipe("tinker_ppo", "sum", DR_GRPO),
    "tinker_cispo": _recipe("tinker_cispo", "sum", DR_GRPO),
    "tinker_dro": _recipe("tinker_dro", "sum", DR_GRPO, {"beta": 0.05}),
    # algorithms
    "grpo": _recipe("ppo_clip", "sequence_mean", kl_coef=0.04, kl_estimator="k3"),
    "dr_grpo": _recipe("ppo_clip", "seq_mean_token_sum_norm", DR_GRPO),
    "dapo": _recipe("ppo_clip", settings=_clip(0.2, 0.28)),
    "gpg": _recipe("policy_gradient", advantages=DR_GRPO),
    "rloo": _recipe("policy_gradient", "seq_mean_token_sum_norm", {"estimator": "rloo"}),
    "opo": _recipe("policy_gradient", "seq_mean_token_sum_norm", {"estimator": "opo"}),
    "maxrl": _recipe("policy_gradient", advantages={"estimator": "maxrl"}),
    "pass_at_k": _recipe("ppo_clip", advantages={"estimator": "pass_at_k", "k": 4}),
    "reinforce_plus_plus": _recipe("ppo_clip", advantages={"estimator": "reinforce_plus_plus"}),
    "reinforce_plus_plus_baseline": _recipe(
        "ppo_clip",
        advantages={"estimator": "reinforce_plus_plus_baseline"},
        kl_coef=0.001,
        kl_estimator="k2",
    ),
    # corrections for the rollout engine
    "tis": _recipe("ppo_clip", off_policy={"is_level": "token", "is_max": 2.0}),
    "sequence_tis": _recipe("ppo_clip", off_policy={"is_level": "sequence", "is_max": 5.0}),
    "icepop": _recipe(
        "ppo_clip",
        off_policy={"is_level": "token", "is_min": 0.5, "is_max": 5.0, "is_outside": "mask"},
    ),
    "geometric_rejection": _recipe(
        "ppo_clip",
        off_policy={"reject_level": "geometric", "reject_min": 0.99, "reject_max": 1.01},
    ),
    "outlier_rejection": _recipe(
        "ppo_clip",
        off_policy={"reject_level": "any_token", "reject_min": 1e-4, "reject_max": 100.0},
    ),
    "decoupled_ppo": _recipe("ppo_clip", off_policy={"is_level": "token", "is_max": 5.0}),
    "unbiased_kl_grpo": _recipe("ppo_clip", kl_coef=0.001, kl_estimator="k3", kl_is_weighted=True),
}


def preset(name: str) -> Preset:
    """Returns a copy of a preset, to change and use.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}.")
    return copy.deepcopy(PRESETS[name])


def preset_objective(name: str, **changes: Any) -> Objective:
    """Returns the objective of a preset; reduction and advantages are the data's part.

    Args:
        name: of `PRESETS`.
        **changes: fields of `Objective` that replace the preset's.

    >>> preset_objective("dapo").loss_settings
    {'clip_ratio_low': 0.2, 'clip_ratio_high': 0.28}
    """
    fields = {k: v for k, v in preset(name).items() if k in _OBJECTIVE_FIELDS}
    return Objective(**{**fields, **changes})
