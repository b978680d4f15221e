"""Policy losses with a ratio of the whole sequence.

They are written per token, so that token weights hold for them too: every token of a sequence gets
the sequence's value. With `sequence_mean` this is the papers' mean over sequences. `sequences`
(see `ops.sequences`) knows the sequences' borders, packed or split over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.ratios import bounded_exp, log_ratio
from ..ops.sequences import Sequences
from ..types import TokenLoss
from .bounds import check_clip_offsets, check_positive
from .policy import clipped_surrogate


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> TokenLoss:
    """Clipped PPO with one length-normalised ratio per sequence.

    Formula: s = exp(mean over the sequence of log_probs - old_log_probs);
    l = max(-s A, -clip(s, 1 - low, 1 + high) A), the gradient through the whole s.

    Args:
        log_probs: current policy, [rows, S], nats; gets the gradient.
        old_log_probs, advantages: same shape, constant.
        sequences: which tokens belong together.
        clip_ratio_low, clip_ratio_high: offsets from 1. The paper's defaults; s varies much less
            than a token's ratio, so the 0.2 of several trainers clips next to nothing.

    Returns:
        `TokenLoss`; `clip_fraction` and `ratio_mean` are of s, by token.

    Source: Zheng et al., "Group Sequence Policy Optimization" (2025).
    """
    check_clip_offsets(clip_ratio_low, clip_ratio_high)
    s = bounded_exp(sequences.mean(log_ratio(log_probs, old_log_probs)))
    return clipped_surrogate(s, advantages, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)


def gspo_token(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> TokenLoss:
    """GSPO whose gradient goes to each token by its own advantage.

    Formula: as `gspo` with s_t = sg(s) exp(log_probs - sg(log_probs)). The same gradient as `gspo`
    where advantages and weights are equal within a sequence.

    Args, Returns: as `gspo`.

    Source: Zheng et al. (2025).
    """
    check_clip_offsets(clip_ratio_low, clip_ratio_high)
    s = bounded_exp(sequences.mean(log_ratio(log_probs.detach(), old_log_probs)))
    s = s * log_ratio(log_probs, log_probs).exp()
    return clipped_surrogate(s, advantages, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    log_clip_low: float = 0.4,
    log_clip_high: float = 0.4,
) -> TokenLoss:
    """Geometric mean of token ratios, each clipped before the mean.

    Formula: d = log_probs - old_log_probs; c = min(d, clip(d)) for A >= 0, max(d, clip(d)) for
    A < 0, with clip to [-log_clip_low, log_clip_high]; l = -A exp(mean over the sequence of c).

    Args:
        log_probs, old_log_probs, advantages, sequences: as in `gspo`.
        log_clip_low, log_clip_high: bounds of the log-ratio, nats, > 0. The paper's 0.4; verl 0.2.

    Returns:
        `TokenLoss`; `clip_fraction` counts tokens whose clip binds.

    Source: Zhao et al., "Geometric-Mean Policy Optimization" (2025).
    """
    check_positive("log_clip_low", log_clip_low)
    check_positive("log_clip_high", log_clip_high)
    d = log_ratio(log_probs, old_log_probs)
    clipped = d.clamp(-log_clip_low, log_clip_high)
    negative = advantages < 0
    d = torch.where(negative, torch.maximum(d, clipped), torch.minimum(d, clipped))
    s = bounded_exp(sequences.mean(d))
    binds = torch.where(negative, d == -log_clip_low, d == log_clip_high)
    return TokenLoss(-s * advantages, {"clip_fraction": binds.float(), "ratio_mean": s.detach()})


def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    truncate_positive: float | None = None,
) -> TokenLoss:
    """Tapered off-policy REINFORCE: bad samples fade as the policy leaves them.

    Formula: rho = exp(sum over the sequence of log_probs - old_log_probs); l = -sg(a) A log_probs
    with a = min(rho, 1) for A < 0, and for A >= 0 a = 1, or min(rho, truncate_positive) if given.

    Args:
        log_probs, old_log_probs, advantages, sequences: as in `gspo`.
        truncate_positive: upper bound of the weight of good samples; None: weight 1 (the paper).

    Returns:
        `TokenLoss`; `clip_fraction` counts tokens whose rho was cut.

    Source: Le Roux et al., "Tapered Off-Policy REINFORCE" (2025).
    """
    if truncate_positive is not None:
        check_positive("truncate_positive", truncate_positive)
    rho = bounded_exp(sequences.sum(log_ratio(log_probs, old_log_probs).detach()))
    good = torch.ones_like(rho) if truncate_positive is None else rho.clamp(max=truncate_positive)
    weight = torch.where(advantages < 0, rho.clamp(max=1.0), good)
    loss = -weight * advantages * log_probs
    return TokenLoss(loss, {"clip_fraction": (weight != rho).float(), "ratio_mean": rho})
