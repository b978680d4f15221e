"""Random micro-batches for the losses, and settings under which each loss does all it can do."""

from __future__ import annotations

import torch

from megatron_rl_loss.losses.registry import LOSSES
from megatron_rl_loss.ops.sequences import Sequences

TENSORS = (
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
)
# a loss not listed has no other interesting setting than its defaults
SETTINGS = {
    "ppo_clip": [{}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}],
    "dual_clip": [{}, {"dual_clip_ratio": 1.5, "clip_ratio_low": 0.3}],
    "cispo": [{}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}],
    "sapo": [{}, {"tau_positive": 0.5, "tau_negative": 3.0}],
    "dro": [{"beta": 0.05}, {"beta": 2.0}],
    "tinker_dro": [{"beta": 0.05}],
    "dppo_tv": [{"divergence_max": 0.05}],
    "dppo_kl": [{"divergence_max": 0.01}],
    "gspo": [{}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}],
    "gspo_token": [{}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}],
    "gmpo": [{}, {"log_clip_low": 0.1, "log_clip_high": 0.2}],
    "topr": [{}, {"truncate_positive": 1.1}],
    "clip_cov": [{}, {"cov_fraction": 0.3, "cov_min": -0.1, "cov_max": 0.4}],
    "kl_cov": [{}, {"cov_fraction": 0.25, "cov_kl_coef": 3.0}],
    "tinker_ppo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}],
    "tinker_cispo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}],
    "top_k_distillation": [{}, {"with_rest": True}],
}
LOSSES_WITH_SETTINGS = [
    (name, settings) for name in LOSSES for settings in SETTINGS.get(name, [{}])
]
# those of one log-prob per token; the others are in test_top_k_distillation
LABEL_LOSSES = [name for name, spec in LOSSES.items() if not spec.reads_token_set]


def random_case(rows=5, length=7, dtype=torch.float64, seed=0, spread=0.5):
    """Log-probs about -1.5, advantages of both signs; row 1 has no trained token.

    Masked positions hold 0, as a loss function gets them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    loss_mask = torch.rand(rows, length, generator=generator) < 0.7
    loss_mask[1:2] = False
    log_probs = -1.5 + 0.4 * normal(rows, length)
    tensors = {name: log_probs + spread * normal(rows, length) for name in TENSORS}
    tensors = {name: value.clamp(max=-0.05) for name, value in tensors.items()}
    tensors["log_probs"] = log_probs.clamp(max=-0.05)
    tensors["advantages"] = normal(rows, length)
    tensors = {k: torch.where(loss_mask, v, 0.0).to(dtype) for k, v in tensors.items()}
    weights = torch.where(loss_mask, torch.rand(rows, length, generator=generator), 0.0).to(dtype)
    return tensors, loss_mask, weights


def call_loss(name, settings, tensors, loss_mask, **replaced):
    """Calls the plain loss function with what it needs."""
    spec = LOSSES[name]
    given = {**tensors, "loss_mask": loss_mask, "sequences": Sequences(loss_mask), **replaced}
    return spec.fn(*(given[need] for need in spec.needs), **settings)


def as_sequences(tensors, loss_mask, weights):
    """The trained tokens as lists of dicts of Python floats, for the reference."""
    return [
        [
            {k: float(v[i, t]) for k, v in tensors.items()} | {"w": float(weights[i, t])}
            for t in range(loss_mask.shape[1])
            if loss_mask[i, t]
        ]
        for i in range(loss_mask.shape[0])
    ]


# fields of objectives that sum over whole sequences
SEQUENCE_LEVEL = {
    "gspo": {
        "loss": "gspo",
        "loss_settings": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    },
    "gspo_token": {
        "loss": "gspo_token",
        "loss_settings": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    },
    "gmpo": {"loss": "gmpo"},
    "topr": {"loss": "topr"},
    "sequence IS": {"off_policy": {"is_level": "sequence", "reject_level": "geometric"}},
    "any token": {"off_policy": {"reject_level": "any_token", "negative_max_kl": 0.01}},
}
