"""Distillation on the student's own samples."""

from __future__ import annotations

from torch import Tensor

from ..ops.ratios import log_ratio, ratio
from ..types import TokenLoss


def on_policy_distillation(
    log_probs: Tensor, old_log_probs: Tensor, teacher_log_probs: Tensor
) -> TokenLoss:
    """Reverse KL to a teacher, token by token, as an importance-sampled policy gradient.

    Formula: l = r (old_log_probs - teacher_log_probs), r = exp(log_probs - old_log_probs): its
    mean over samples of the old policy has, on-policy, the gradient of KL(policy || teacher) given
    each prefix. It reads no advantages; to mix with a reward, add
    -coef (old_log_probs - teacher_log_probs) to the advantages of another loss.

    Args:
        log_probs: student, any shape, nats; gets the gradient.
        old_log_probs: the student that sampled, same shape, constant.
        teacher_log_probs: same shape, constant.

    Returns:
        `TokenLoss` with the stat `reverse_kl` (log_probs - teacher_log_probs).

    Source: Lu, "On-Policy Distillation", Thinking Machines Lab (2025).
    """
    gap = log_ratio(old_log_probs.detach(), teacher_log_probs)
    r = ratio(log_probs, old_log_probs)
    reverse_kl = log_ratio(log_probs.detach(), teacher_log_probs)
    return TokenLoss(r * gap, {"reverse_kl": reverse_kl, "ratio_mean": r.detach()})
