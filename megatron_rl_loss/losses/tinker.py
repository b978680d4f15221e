"""Tinker's losses, with its absolute thresholds, its defaults and its anchor.

Tinker's `logprobs` are those of the sampler (`rollout_log_probs` here), its losses are token sums
(reduction "sum"), and an advantage of 0 takes the place of a mask. Its `cross_entropy` is the one
of `losses.cross_entropy` with Tinker's `weights` as `loss_weights`.

Source: https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from torch import Tensor

from ..ops.ratios import ratio
from ..types import TokenLoss
from .bounds import check_thresholds
from .policy import clipped_surrogate, importance_sampling
from .trust_region import clipped_weight_loss, dro


def tinker_importance_sampling(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor
) -> TokenLoss:
    """Tinker's `importance_sampling`.

    Formula: l = -exp(log_probs - rollout_log_probs) A.

    >>> from torch import tensor
    >>> x = tinker_importance_sampling(tensor([-1.0]), tensor([-1.5]), tensor([2.0]))
    >>> round(x.loss.item(), 4)
    -3.2974
    """
    return importance_sampling(log_probs, rollout_log_probs, advantages)


def tinker_ppo(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> TokenLoss:
    """Tinker's `ppo`: the thresholds are ratios, not offsets from 1.

    Formula: l = max(-r A, -clip(r, low, high) A), r = exp(log_probs - rollout_log_probs).

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
        rollout_log_probs, advantages: same shape, constant.
        clip_low_threshold, clip_high_threshold: absolute, 0 <= low <= 1 <= high.
    """
    check_thresholds(clip_low_threshold, clip_high_threshold)
    r = ratio(log_probs, rollout_log_probs)
    return clipped_surrogate(r, advantages, clip_low_threshold, clip_high_threshold)


def tinker_cispo(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> TokenLoss:
    """Tinker's `cispo`: one-sided by default.

    Formula: l = -sg(clip(r, low, high)) A log_probs, r = exp(log_probs - rollout_log_probs).

    Args: as in `tinker_ppo`.
    """
    check_thresholds(clip_low_threshold, clip_high_threshold)
    return clipped_weight_loss(
        log_probs, rollout_log_probs, advantages, clip_low_threshold, clip_high_threshold
    )


def tinker_dro(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *, beta: float
) -> TokenLoss:
    """Tinker's `dro`.

    Formula: l = -(A log_probs - beta / 2 (log_probs - rollout_log_probs)^2).

    Args:
        log_probs, rollout_log_probs, advantages: as in `tinker_ppo`.
        beta: > 0 (Tinker's example: 0.05).
    """
    return dro(log_probs, rollout_log_probs, advantages, beta=beta)
