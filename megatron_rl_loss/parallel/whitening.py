"""Batch whitening of advantages, over the trained tokens of the whole mini-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_loss_mask, per_token


def whiten(
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    dp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns advantages with mean 0 and variance 1 over all trained tokens.

    Formula: (A - mean) / sqrt(var + eps), var with N - 1; the mean is added back without
    `shift_mean`. Exactly 0 (with `shift_mean`) where all advantages are equal.

    Args:
        advantages: [rows, S] or [rows], every row of this rank's part of the mini-batch.
        loss_mask: [rows, S] bool, whole sequences.
        shift_mean: take the mean away.
        eps: added to the variance.
        dp_group: data-parallel group without context parallelism; None: this rank has it all.

    Returns:
        [rows, S] fp32, constant, 0 at masked positions.

    Communicates: one SUM all-reduce of 2 numbers, one of 1, one MAX of 2, over `dp_group`.

    Source: the whitening of Ziegler et al. (2019); with `estimator="reinforce_plus_plus"` it is
    Hu, "REINFORCE++" (2025).
    """
    check_loss_mask(loss_mask)
    values = per_token("advantages", advantages, loss_mask).detach().double()
    values = torch.where(loss_mask, values, 0.0)
    total, count = _all_reduce(torch.stack([values.sum(), loss_mask.sum()]), dp_group)
    mean = total / count.clamp(min=1)
    centered = torch.where(loss_mask & ~_constant(values, loss_mask, dp_group), values - mean, 0.0)
    squares = _all_reduce(centered.square().sum().reshape(1), dp_group)
    scaled = centered * torch.rsqrt(squares / (count - 1).clamp(min=1) + eps)
    return torch.where(loss_mask, scaled if shift_mean else scaled + mean, 0.0).float()


def _constant(values: Tensor, loss_mask: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    least = values.new_full((1,), -torch.inf)  # a rank may have no rows at all
    masked = [torch.where(loss_mask, x, -torch.inf).flatten() for x in (values, -values)]
    extremes = [torch.cat([least, x]).amax() for x in masked]
    top, bottom = _all_reduce(torch.stack(extremes), group, dist.ReduceOp.MAX)
    return top == -bottom


def _all_reduce(x: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    x = x.double()
    if group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x
