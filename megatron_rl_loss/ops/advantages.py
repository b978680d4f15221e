"""Advantages from one reward per sequence, relative to the other samples of the same prompt.

Every estimator takes whole groups (all samples of a prompt are on this rank), works in fp64 and
returns one fp32 value per sequence, constant. A group whose rewards are all equal, and so a group
of one, gives exactly 0: rounding must not be blown up by a division by a tiny spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError


def grpo_advantages(
    rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Returns rewards relative to their group's mean, in units of its standard deviation.

    Formula: A_i = (r_i - mean_g) / (std_g + eps), std_g with n - 1 (as torch.std);
    A_i = r_i - mean_g without `normalize_by_std` (Dr. GRPO).

    Args:
        rewards: [N] float, one per sequence.
        group_ids: [N] int, the prompt of each sequence; need not be sorted.
        normalize_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation, reward units.

    Returns:
        [N] fp32; exactly 0 for a constant group and for a group of one.

    Raises:
        InputError: shapes or dtypes are wrong, or a reward is not finite.

    Source: Shao et al., "DeepSeekMath" (2024), sec. 4.1; Liu et al., "Understanding R1-Zero-Like
    Training" (2025) without the division. eps and n - 1 differ in public code; this is verl's.

    >>> grpo_advantages(torch.tensor([1.0, 0.0, 0.35]), torch.tensor([7, 7, 9]))
    tensor([ 0.7071, -0.7071,  0.0000])
    """
    groups = Groups(rewards, group_ids)
    centered = groups.centered()
    if normalize_by_std:
        centered = centered / (groups.std() + eps)
    return centered.float()


class Groups:
    """Rewards by group, fp64; every result is [N], a value per sequence."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        _check_rewards(rewards, group_ids)
        self.rewards = rewards.detach().double()
        unique, self.index = group_ids.unique(return_inverse=True)
        self.num_groups = len(unique)
        self.size = self.sum(torch.ones_like(self.rewards))

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over each sequence's group."""
        sums = values.new_zeros(self.num_groups).index_add_(0, self.index, values)
        return sums[self.index]

    def mean(self) -> Tensor:
        return self.sum(self.rewards) / self.size

    def constant(self) -> Tensor:
        """Returns True where all rewards of the group are equal."""
        extremes = [
            self.rewards.new_zeros(self.num_groups).scatter_reduce_(
                0, self.index, self.rewards, how, include_self=False
            )
            for how in ("amin", "amax")
        ]
        return (extremes[0] == extremes[1])[self.index]

    def centered(self, baseline: Tensor | None = None) -> Tensor:
        """Returns rewards minus the baseline (default: the group's mean), 0 in constant groups."""
        baseline = self.mean() if baseline is None else baseline
        return torch.where(self.constant(), 0.0, self.rewards - baseline)

    def std(self) -> Tensor:
        """Returns the group's standard deviation, with n - 1; 1 in constant groups."""
        squares = self.sum(self.centered().square())
        return torch.where(self.constant(), 1.0, (squares / (self.size - 1)).sqrt())


def _check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise InputError(
            f"rewards must be float [N], one per sequence, got {rewards.dtype} "
            f"{tuple(rewards.shape)}."
        )
    if group_ids.shape != rewards.shape or group_ids.is_floating_point():
        raise InputError(
            f"group_ids must be integer {tuple(rewards.shape)} like rewards, got "
            f"{group_ids.dtype} {tuple(group_ids.shape)}."
        )
    if not bool(rewards.isfinite().all()):
        i = int((~rewards.isfinite()).nonzero()[0])
        raise InputError(
            f"the reward of sequence {i} is {rewards[i].item()}; rewards must be finite."
        )
