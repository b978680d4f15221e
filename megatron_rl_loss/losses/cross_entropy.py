"""Negative log-likelihood, for supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from ..types import TokenLoss


def cross_entropy(log_probs: Tensor) -> TokenLoss:
    """Negative log-likelihood of the labels.

    Formula: l = -log_probs. Per-token float weights, of any sign (Tinker's `weights`), go into
    `loss_weights`.

    Args:
        log_probs: current policy, any shape, nats; gets the gradient.
    """
    return TokenLoss(-log_probs)
