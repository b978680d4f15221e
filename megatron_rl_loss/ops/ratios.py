"""Probability ratios that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside every clip range, far inside fp32


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Returns `log_probs - old_log_probs` in fp32, nats, with gradient to `log_probs` only."""
    return log_probs.float() - old_log_probs.detach().float()


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Returns exp(log_probs - old_log_probs), finite at any distance.

    Formula: r = exp(clamp(log_probs - old_log_probs, -20, 20)). Outside +-20 nats the value is
    constant, so its gradient is 0. NaN stays NaN.

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
        old_log_probs: same shape, nats, constant.

    >>> ratio(torch.tensor([100.0]), torch.tensor([0.0])).isfinite().item()
    True
    """
    return log_ratio(log_probs, old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
