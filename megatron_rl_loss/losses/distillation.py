"""Distillation from a teacher: by the sampled token, or by the teacher's k most probable ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.precision import at_least_fp32
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


def top_k_forward_kl(
    token_log_probs: Tensor, teacher_top_log_probs: Tensor, *, with_rest: bool = False
) -> TokenLoss:
    """Forward KL to a teacher over its k most probable tokens of each position.

    Formula: l = sum_k q_k (log q_k - log p_k), q_k = exp(teacher_top_log_probs). `with_rest` adds
    all other tokens as one, (1 - Q) (log(1 - Q) - log(1 - P)) with Q = sum_k q_k, P = sum_k p_k
    (at most 1 - 1e-6): l is then a KL itself, never negative and never above the whole one.

    An entry with q_k = 0 counts nowhere, also not in P: where the teacher gave fewer than k tokens,
    fill up with any token and a log-prob of -inf, or one as low as -1000. As the loss
    "top_k_distillation" it gets `token_log_probs` from the forward step, for the ids in
    `teacher_top_ids`; by itself, from `vocab_parallel_outputs(logits, token_ids=...)`.

    Args:
        token_log_probs: student's log-probs of the teacher's tokens, [..., k], nats; gets the
            gradient.
        teacher_top_log_probs: same shape, nats, constant.
        with_rest: see above.

    Returns:
        `TokenLoss`, [...], with the stat `teacher_mass` (Q).

    Raises:
        InputError: the shapes differ.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), cut to k tokens.

    >>> teacher = torch.tensor([[0.5, 0.25]]).log()
    >>> top_k_forward_kl(teacher, teacher, with_rest=True).loss
    tensor([0.])
    """
    if token_log_probs.shape != teacher_top_log_probs.shape or not token_log_probs.dim():
        raise InputError(
            f"token_log_probs {list(token_log_probs.shape)} and teacher_top_log_probs "
            f"{list(teacher_top_log_probs.shape)} must have one shape [..., k]; nothing is "
            "broadcast."
        )
    log_p, log_q = at_least_fp32(token_log_probs), at_least_fp32(teacher_top_log_probs.detach())
    q = log_q.exp()
    used = q != 0  # NaN is used, and seen
    # 0 * (-inf - x) would be NaN for a token the teacher rules out
    log_p, log_q = torch.where(used, log_p, 0.0), torch.where(used, log_q, 0.0)
    loss = (q * (log_q - log_p)).sum(-1)
    mass = q.sum(-1)
    if with_rest:
        loss = loss + _rest(mass, torch.where(used, log_p.exp(), 0.0).sum(-1))
    return TokenLoss(loss, {"teacher_mass": mass})


def _rest(q: Tensor, p: Tensor) -> Tensor:
    """(1 - q) (log(1 - q) - log(1 - p)), both at most 1 - 1e-6."""
    log_rest_q, log_rest_p = (torch.log1p(-x.clamp(max=1.0 - 1e-6)) for x in (q, p))
    return log_rest_q.exp() * (log_rest_q - log_rest_p)
