"""Policy losses over sampled tokens, un-reduced, one fp32 value per token.

r = exp(log_probs - old_log_probs) (clamped, see `ops.ratios`), A the advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.ratios import ratio
from ..types import TokenLoss
from .bounds import check_clip_offsets


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Clipped PPO with separate bounds.

    Formula: l = max(-r A, -clip(r, 1 - low, 1 + high) A).

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
        old_log_probs, advantages: same shape, constant.
        clip_ratio_low, clip_ratio_high: offsets from 1, 0 <= low <= 0.5 and 0 <= high < 1 (DAPO's
            "clip higher" is high > low).

    Returns:
        `TokenLoss` with the stats `clip_fraction` (1 where the clip binds: A > 0 and r > 1 + high,
        or A < 0 and r < 1 - low) and `ratio_mean`.

    Raises:
        ConfigError: a bound is out of range, or looks like an absolute ratio.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; Yu et al.,
    "DAPO" (2025), eq. 8.

    >>> ppo_clip(torch.tensor([1.5]).log(), torch.zeros(1), torch.ones(1)).loss
    tensor([-1.2000])
    """
    check_clip_offsets(clip_ratio_low, clip_ratio_high)
    r = ratio(log_probs, old_log_probs)
    return clipped_surrogate(r, advantages, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)


def clipped_surrogate(r: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """Returns max(-r A, -clip(r, low, high) A) for a ratio of any kind and absolute bounds."""
    loss = torch.maximum(-r * advantages, -r.clamp(low, high) * advantages)
    binds = ((advantages > 0) & (r > high)) | ((advantages < 0) & (r < low))
    return TokenLoss(loss, {"clip_fraction": binds.float(), "ratio_mean": r.detach()})


def dual_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip_ratio: float = 3.0,
) -> TokenLoss:
    """Clipped PPO whose loss is also bounded for negative advantages.

    Formula: l = ppo_clip for A >= 0; min(ppo_clip, -c A) for A < 0, with c = dual_clip_ratio.

    Args:
        log_probs, old_log_probs, advantages, clip_ratio_low, clip_ratio_high: as in `ppo_clip`.
        dual_clip_ratio: c > 1; tokens with A < 0 and r > c get no gradient.

    Returns:
        `TokenLoss` with `ppo_clip`'s stats and `dual_clip_fraction`.

    Raises:
        ConfigError: c <= 1, or a bound is out of range.

    Source: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning"
    (2020), eq. 5.
    """
    if not dual_clip_ratio > 1.0:
        raise ConfigError(f"dual_clip_ratio must be > 1 (usual: 3), got {dual_clip_ratio}.")
    clipped = ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
    )
    bound = -dual_clip_ratio * advantages
    binds = (advantages < 0) & (clipped.loss > bound)
    return TokenLoss(
        torch.where(binds, bound, clipped.loss),
        {**clipped.stats, "dual_clip_fraction": binds.float()},
    )


def importance_sampling(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """Unclipped importance-sampled policy gradient.

    Formula: l = -r A. With r = 1 (on-policy) its gradient is that of `policy_gradient`.

    Source: Tinker's `importance_sampling`.

    >>> x = importance_sampling(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([2.0]))
    >>> round(x.loss.item(), 4)
    -3.2974
    """
    r = ratio(log_probs, old_log_probs)
    return TokenLoss(-r * advantages, {"ratio_mean": r.detach()})


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """REINFORCE.

    Formula: l = -log_probs A.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    return TokenLoss(-log_probs * advantages)
