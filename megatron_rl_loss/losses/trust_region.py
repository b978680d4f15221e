"""Per-token losses that keep the policy near the old one by other means than PPO's clip.

r = exp(log_probs - old_log_probs), A the advantage, sg(.) a constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.ratios import log_ratio, ratio
from ..types import TokenLoss
from .bounds import check_positive

_LARGEST_LOG_PROB = -1e-6  # keeps log(1 - p) finite in fp32


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 4.0,
) -> TokenLoss:
    """REINFORCE whose importance weight, not its gradient, is clipped: every token learns.

    Formula: l = -sg(clip(r, 1 - low, 1 + high)) A log_probs.

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
        old_log_probs, advantages: same shape, constant.
        clip_ratio_low, clip_ratio_high: offsets from 1, 0 <= low <= 1 (1: no lower bound) and
            high >= 0. Public defaults differ: high is 4 here and in Tinker, 0.2 in verl.

    Returns:
        `TokenLoss`; `clip_fraction` counts tokens whose weight was changed.

    Source: MiniMax, "MiniMax-M1" (2025).
    """
    if not (0.0 <= clip_ratio_low <= 1.0 and 0.0 <= clip_ratio_high < float("inf")):
        raise ConfigError(
            "clip_ratio_low must be in [0, 1] and clip_ratio_high finite and >= 0, got "
            f"{clip_ratio_low} and {clip_ratio_high}: they are offsets from 1 (high 4 bounds the "
            "weight by 5)."
        )
    return clipped_weight_loss(
        log_probs, old_log_probs, advantages, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    )


def clipped_weight_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, low: float, high: float
) -> TokenLoss:
    """Returns -sg(clip(r, low, high)) A log_probs."""
    r = ratio(log_probs, old_log_probs).detach()
    loss = -r.clamp(low, high) * advantages * log_probs
    outside = (r < low) | (r > high)
    return TokenLoss(loss, {"clip_fraction": outside.float(), "ratio_mean": r})


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """Soft gate on the ratio instead of a clip.

    Formula: l = -(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A.

    Args:
        log_probs, old_log_probs, advantages: as in `cispo`.
        tau_positive, tau_negative: sharpness of the gate for A > 0 and A <= 0, > 0.

    Source: Gao et al., "Soft Adaptive Policy Optimization" (2025).
    """
    check_positive("tau_positive", tau_positive)
    check_positive("tau_negative", tau_negative)
    r = ratio(log_probs, old_log_probs)
    tau = torch.full_like(r, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = 4.0 / tau * torch.sigmoid(tau * (r - 1.0))
    return TokenLoss(-gate * advantages, {"ratio_mean": r.detach()})


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """Off-policy policy gradient with a quadratic pull to the old policy.

    Formula: l = -(A log_probs - beta / 2 (log_probs - old_log_probs)^2).

    Args:
        log_probs, old_log_probs, advantages: as in `cispo`.
        beta: strength of the pull, > 0; has no default (Tinker's example: 0.05).

    Source: Richemond et al., "Offline Regularised Reinforcement Learning for LLM Alignment"
    (2024), in Tinker's form.
    """
    check_positive("beta", beta)
    d = log_ratio(log_probs, old_log_probs)
    return TokenLoss(0.5 * beta * d.square() - advantages * log_probs)


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    divergence_max: float = 0.2,
) -> TokenLoss:
    """Importance-sampled loss without the tokens that leave a total-variation trust region.

    Formula: l = -m r A, with m = 0 where |p - p_old| > divergence_max and A pushes r further from
    1 (A > 0 and r > 1, or A < 0 and r < 1), else m = 1; p = exp(log_probs).

    Args:
        log_probs, old_log_probs, advantages: as in `cispo`.
        divergence_max: largest change of the sampled token's probability, in (0, 1].

    Returns:
        `TokenLoss`; `clip_fraction` counts the tokens left out.

    Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026). The
    paper's anchor is the rollout policy: pass its log-probs as old_log_probs for that.
    """
    if not 0.0 < divergence_max <= 1.0:
        raise ConfigError(f"divergence_max of dppo_tv must be in (0, 1], got {divergence_max}.")
    change = (log_probs.detach().exp() - old_log_probs.exp()).abs()
    return _inside_trust_region(log_probs, old_log_probs, advantages, change > divergence_max)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    divergence_max: float = 0.05,
) -> TokenLoss:
    """Importance-sampled loss without the tokens that leave a binary-KL trust region.

    Formula: as `dppo_tv`, with the divergence
    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), nats.

    Args:
        log_probs, old_log_probs, advantages: as in `cispo`.
        divergence_max: nats, > 0.

    Source: as `dppo_tv`.
    """
    check_positive("divergence_max", divergence_max)
    divergence = _binary_kl(old_log_probs, log_probs.detach())
    return _inside_trust_region(log_probs, old_log_probs, advantages, divergence > divergence_max)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_p, log_q = (x.clamp(max=_LARGEST_LOG_PROB) for x in (log_p, log_q))
    p = log_p.exp()
    other = torch.log(-torch.expm1(log_p)) - torch.log(-torch.expm1(log_q))
    return p * (log_p - log_q) + (1.0 - p) * other


def _inside_trust_region(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, too_far: Tensor
) -> TokenLoss:
    r = ratio(log_probs, old_log_probs)
    outwards = ((advantages > 0) & (r > 1.0)) | ((advantages < 0) & (r < 1.0))
    left_out = too_far & outwards
    loss = torch.where(left_out, 0.0, -r * advantages)
    return TokenLoss(loss, {"clip_fraction": left_out.float(), "ratio_mean": r.detach()})
