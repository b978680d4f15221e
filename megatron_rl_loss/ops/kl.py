"""Per-token estimators of KL(policy || reference) from the sampled token's log-probs.

With d = log_probs - ref_log_probs (nats), following J. Schulman, "Approximating KL
Divergence" (2020):

    k1   d                  abs   |d|
    k2   d^2 / 2            k1+   value of k1, gradient of k2
    k3   exp(-d) - 1 + d    k3+   value of k3, gradient of k2
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checks import check_same_shape
from ..errors import ConfigError, InputError
from .ratios import MAX_LOG_RATIO, log_ratio, ratio

Estimator = Callable[[Tensor], Tensor]


def kl_k1(d: Tensor) -> Tensor:
    """Returns d: unbiased, high variance, may be negative. Its gradient has mean zero."""
    return d


def kl_k2(d: Tensor) -> Tensor:
    """Returns d^2 / 2: biased, low variance; its gradient is that of the KL for on-policy data."""
    return 0.5 * d * d


def kl_k3(d: Tensor) -> Tensor:
    """Returns exp(-d) - 1 + d: unbiased, non-negative; finite at any d.

    Below d = -20 the exponential goes on as its tangent, so that value and gradient stay finite
    and still pull the policy back (a clamp would cut the gradient to 0 there). Its gradient,
    1 - exp(-d), is that of KL(reference || policy) for on-policy data; "k3+" has that of
    KL(policy || reference).

    >>> round(kl_k3(torch.tensor(0.5)).item(), 6)
    0.106531
    """
    x = -d
    inside = x.clamp(max=MAX_LOG_RATIO)
    return inside.exp() * (1.0 + (x - inside)) - 1.0 - x


def straight_through(value: Estimator, gradient: Estimator) -> Estimator:
    """Returns an estimator with the value of one and the gradient of another."""

    def estimator(d: Tensor) -> Tensor:
        carrier = gradient(d)
        return value(d.detach()) + (carrier - carrier.detach())

    return estimator


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": torch.abs,
    "k1+": straight_through(kl_k1, kl_k2),
    "k3+": straight_through(kl_k3, kl_k2),
}
# r * k has the gradient of KL(policy || reference) off-policy only for these
IS_WEIGHTED_ESTIMATORS = ("k1", "k3")


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Returns the un-reduced per-token KL estimate to the reference.

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
        ref_log_probs: reference, same shape, nats, constant.
        estimator: one of `KL_ESTIMATORS`.

    Raises:
        ConfigError: the estimator is unknown.

    >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.0]), "k3")
    tensor([0.])
    """
    return kl_estimator(estimator)(log_ratio(log_probs, ref_log_probs))


def is_weighted_kl(
    log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3"
) -> Tensor:
    """Returns the KL estimate for tokens sampled from the old policy, with an unbiased gradient.

    Formula: r * k(d), r = exp(log_probs - old_log_probs), with gradient through both factors:
    for k1 and k3 its mean over samples of the old policy is the gradient of
    KL(policy || reference).

    Args:
        log_probs, ref_log_probs: as in `kl_penalty`.
        old_log_probs: the policy that sampled, same shape, nats, constant.
        estimator: "k1" or "k3".

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), sec. 3.1, unbiased KL estimate.
    """
    check_kl_estimator(estimator, is_weighted=True)
    return ratio(log_probs, old_log_probs) * kl_penalty(log_probs, ref_log_probs, estimator)


def kl_estimator(name: str) -> Estimator:
    """Returns the estimator called `name`, a function of d = log_probs - ref_log_probs."""
    check_kl_estimator(name)
    return KL_ESTIMATORS[name]


def check_kl_estimator(name: str, *, is_weighted: bool = False) -> None:
    """Raises `ConfigError` if there is no such estimator, or it must not be IS-weighted."""
    if name not in KL_ESTIMATORS:
        raise ConfigError(f"unknown KL estimator {name!r}; known: {', '.join(KL_ESTIMATORS)}.")
    if is_weighted and name not in IS_WEIGHTED_ESTIMATORS:
        raise ConfigError(
            f"an importance-weighted KL needs the estimator {' or '.join(IS_WEIGHTED_ESTIMATORS)}, "
            f"got {name!r}: only theirs has the gradient of the KL then."
        )


def kl_shaped_rewards(rewards: Tensor, kl: Tensor, loss_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Returns per-token rewards with the KL folded in: -kl_coef * kl_t, plus the reward at the end.

    Args:
        rewards: [rows], one per sequence, given at its last trained token.
        kl: [rows, S], per-token estimate, nats.
        loss_mask: [rows, S] bool; a row may be all False.
        kl_coef: reward units per nat.

    Returns:
        [rows, S], at least fp32, constant, 0 at masked positions.

    Raises:
        InputError: a shape is another (nothing is broadcast).

    >>> kl_shaped_rewards(torch.ones(1), torch.ones(1, 3), torch.tensor([[True, True, False]]),
    ...                   kl_coef=0.5)
    tensor([[-0.5000,  0.5000,  0.0000]])
    """
    check_same_shape("kl", kl, "loss_mask", loss_mask)
    if rewards.shape != loss_mask.shape[:1]:
        raise InputError(
            f"rewards has shape {tuple(rewards.shape)}, expected ({loss_mask.shape[0]},): one per "
            "row of loss_mask."
        )
    later = loss_mask.flip(-1).cumsum(-1).flip(-1)  # trained tokens from here on
    last = loss_mask & (later == 1)
    penalty = torch.where(loss_mask, -kl_coef * kl.detach(), 0.0)
    return penalty + torch.where(last, rewards.detach().unsqueeze(-1), 0.0)
