"""Masks made from data, to leave tokens out of the loss and of the counts."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_mask(loss_mask: Tensor, *tensors: Tensor) -> Tensor:
    """Returns `loss_mask` without the positions where one of the tensors is NaN or inf.

    A rollout engine may return log-probs that are not finite; those raise an error at trained
    positions. To drop such tokens from loss and counts instead, train with this mask, and make the
    token weights from it too.

    Args:
        loss_mask: [rows, S] bool.
        *tensors: [rows, S] each, or [rows] (then whole rows are dropped).

    >>> mask = torch.tensor([[True, True, False]])
    >>> finite_mask(mask, torch.tensor([[-1.0, float("-inf"), float("nan")]]))
    tensor([[ True, False, False]])
    """
    for tensor in tensors:
        finite = torch.isfinite(tensor)
        loss_mask = loss_mask & (finite if finite.dim() == 2 else finite.unsqueeze(-1))
    return loss_mask
