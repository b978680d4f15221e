"""Losses that treat the tokens with the largest covariance of log-prob and advantage apart.

    cov_t = (log_probs_t - mean log_probs) (A_t - mean A)

The means, and the ranking, are over the trained tokens of **this rank's micro-batch**: these two
losses depend on how the mini-batch is cut, by their definition. They compare thresholds with raw
advantages, so they need explicit weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.ratios import log_ratio, ratio
from ..types import TokenLoss
from .bounds import check_fraction
from .policy import ppo_clip


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_min: float = 1.0,
    cov_max: float = 5.0,
) -> TokenLoss:
    """Clipped PPO without a few of the tokens whose covariance is in a band.

    Formula: l = 0 for the chosen tokens, else ppo_clip. Candidates have cov_min < cov < cov_max
    and no binding clip; of them max(1, cov_fraction N) are chosen, N trained tokens.

    The paper draws at random; here every k-th candidate is taken, in order of position, so that
    tensor-parallel ranks agree and a run can be repeated.

    Args:
        log_probs: current policy, [rows, S], nats; gets the gradient.
        old_log_probs, advantages: same shape, constant; raw advantages.
        loss_mask: same shape, bool.
        clip_ratio_low, clip_ratio_high: as in `ppo_clip`.
        cov_fraction: of the trained tokens, in (0, 1].
        cov_min, cov_max: band of the covariance, nats times reward units.

    Returns:
        `TokenLoss`; `cov_fraction` counts the chosen tokens.

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language
    Models" (2025).
    """
    check_fraction("cov_fraction", cov_fraction)
    if not cov_min < cov_max:
        raise ConfigError(f"cov_min must be below cov_max, got {cov_min} and {cov_max}.")
    clipped = ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
    )
    cov = token_covariance(log_probs, advantages, loss_mask)
    free = loss_mask & (clipped.stats["clip_fraction"] == 0)
    chosen = _spread(free & (cov > cov_min) & (cov < cov_max), _count(loss_mask, cov_fraction))
    loss = torch.where(chosen, 0.0, clipped.loss)
    return TokenLoss(loss, {**clipped.stats, "cov_fraction": chosen.float()})


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cov_fraction: float = 2e-4,
    cov_kl_coef: float = 1.0,
) -> TokenLoss:
    """Importance-sampled loss with a KL term on the tokens of largest covariance.

    Formula: l = -r A, plus cov_kl_coef |log_probs - old_log_probs| for the max(1, cov_fraction N)
    tokens of largest covariance.

    Args:
        log_probs, old_log_probs, advantages, loss_mask: as in `clip_cov`.
        cov_fraction: of the trained tokens, in (0, 1].
        cov_kl_coef: weight of the KL term, >= 0.

    Returns:
        `TokenLoss`; `cov_fraction` counts the chosen tokens.

    Source: Cui et al. (2025).
    """
    check_fraction("cov_fraction", cov_fraction)
    if not 0.0 <= cov_kl_coef < float("inf"):
        raise ConfigError(f"cov_kl_coef must be finite and >= 0, got {cov_kl_coef}.")
    r = ratio(log_probs, old_log_probs)
    cov = token_covariance(log_probs, advantages, loss_mask)
    chosen = loss_mask & _largest(cov, loss_mask, _count(loss_mask, cov_fraction))
    penalty = cov_kl_coef * log_ratio(log_probs, old_log_probs).abs()
    loss = torch.where(chosen, penalty, 0.0) - r * advantages
    return TokenLoss(loss, {"cov_fraction": chosen.float(), "ratio_mean": r.detach()})


def token_covariance(log_probs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns each trained token's share in the covariance, 0 elsewhere; constant."""
    num_tokens = loss_mask.sum().clamp(min=1)

    def centered(x: Tensor) -> Tensor:
        x = torch.where(loss_mask, x.detach(), 0.0)
        return torch.where(loss_mask, x - x.sum() / num_tokens, 0.0)

    return centered(log_probs) * centered(advantages)


def _count(loss_mask: Tensor, fraction: float) -> Tensor:
    return (loss_mask.sum().double() * fraction + 1e-6).floor().clamp(min=1.0).long()


def _spread(candidates: Tensor, count: Tensor) -> Tensor:
    """Returns `count` of the candidates (all, if there are fewer), evenly spaced by position."""
    order = candidates.flatten().cumsum(0)
    num_candidates = order[-1].clamp(min=1)
    count = torch.minimum(count, num_candidates)
    # the k-th candidate is taken when k * count / num_candidates passes a whole number
    taken = order * count // num_candidates > (order - 1) * count // num_candidates
    return candidates & taken.view_as(candidates)


def _largest(values: Tensor, loss_mask: Tensor, count: Tensor) -> Tensor:
    """Returns True for the `count` largest trained values; the earlier of two equal ones wins."""
    ranked = (
        torch.where(loss_mask, values, -torch.inf).flatten().argsort(descending=True, stable=True)
    )
    rank = torch.empty_like(ranked)
    rank[ranked] = torch.arange(len(ranked), device=ranked.device)
    return (rank < count).view_as(values)
