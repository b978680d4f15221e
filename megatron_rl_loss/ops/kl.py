"""Per-token estimators of KL(policy || reference) from the sampled token's log-probs.

With d = log_probs - ref_log_probs (nats), following J. Schulman, "Approximating KL
Divergence" (2020): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from ..errors import ConfigError
from .ratios import MAX_LOG_RATIO, log_ratio


def kl_k1(d: Tensor) -> Tensor:
    """Returns d: unbiased, high variance, may be negative. Its gradient has mean zero."""
    return d


def kl_k2(d: Tensor) -> Tensor:
    """Returns d^2 / 2: biased, low variance; its gradient is that of the KL for on-policy data."""
    return 0.5 * d * d


def kl_k3(d: Tensor) -> Tensor:
    """Returns exp(-d) - 1 + d: unbiased, non-negative; finite at any d.

    Below d = -20 the exponential goes on as its tangent, so that value and gradient stay finite
    and still pull the policy back (a clamp would cut the gradient to 0 there).

    >>> round(kl_k3(torch.tensor(0.5)).item(), 6)
    0.106531
    """
    x = -d
    inside = x.clamp(max=MAX_LOG_RATIO)
    return inside.exp() * (1.0 + (x - inside)) - 1.0 - x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


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


def kl_estimator(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the estimator called `name`, a function of d = log_probs - ref_log_probs."""
    if name not in KL_ESTIMATORS:
        raise ConfigError(f"unknown KL estimator {name!r}; known: {', '.join(KL_ESTIMATORS)}.")
    return KL_ESTIMATORS[name]
