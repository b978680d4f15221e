"""Probability ratios that stay finite."""

from __future__ import annotations

from torch import Tensor

from .precision import at_least_fp32

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside every clip range, far inside fp32


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Returns `log_probs - old_log_probs`, nats, with gradient to `log_probs` only."""
    return at_least_fp32(log_probs) - at_least_fp32(old_log_probs.detach())


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Returns exp(log_probs - old_log_probs), finite at any distance.

    Formula: r = exp(clamp(log_probs - old_log_probs, -20, 20)). Outside +-20 nats the value is
    constant, so its gradient is 0. NaN stays NaN.

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
        old_log_probs: same shape, nats, constant.

    >>> import torch
    >>> ratio(torch.tensor([100.0]), torch.tensor([0.0])).isfinite().item()
    True
    """
    return bounded_exp(log_ratio(log_probs, old_log_probs))


def bounded_exp(x: Tensor) -> Tensor:
    """Returns exp(x), with x clamped to +-20."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
