"""Advantages from one reward per sequence, relative to the other samples of the same prompt.

Every estimator takes whole groups (all samples of a prompt are on this rank), works in fp64 and
returns one fp32 value per sequence, constant. A group whose rewards are all equal, and so a group
of one, gives exactly 0: rounding must not be blown up by a division by a tiny spread.

In the formulas r_i is the reward of sequence i, g its group, n the group's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, InputError


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


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns rewards relative to their group's mean, in reward units.

    Formula: A_i = r_i - mean_g, which is `grpo_advantages` without `normalize_by_std`.

    Source: Liu et al., "Understanding R1-Zero-Like Training" (2025).
    """
    return grpo_advantages(rewards, group_ids, normalize_by_std=False)


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns rewards minus the mean of the group's other rewards.

    Formula: A_i = r_i - mean of r_j, j in g, j != i = n / (n - 1) (r_i - mean_g).

    Args, Returns, Raises: as `grpo_advantages`.

    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024).

    >>> rloo_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0]))
    tensor([ 0.7500, -0.7500,  0.0000])
    """
    groups = Groups(rewards, group_ids)
    return (groups.centered() * groups.size / (groups.size - 1).clamp(min=1)).float()


def opo_advantages(rewards: Tensor, group_ids: Tensor, *, num_tokens: Tensor) -> Tensor:
    """Returns rewards minus the length-weighted mean of the group.

    Formula: A_i = r_i - (sum_g len_j r_j) / (sum_g len_j): the baseline of least variance, if
    gradient norms grow with the length and are independent of the reward.

    Args:
        rewards, group_ids: as in `grpo_advantages`.
        num_tokens: [N], len_i, trained tokens of each sequence; at least 1 in each group.

    Source: Hao et al., "On-Policy RL with Optimal Reward Baseline" (2025).
    """
    groups = Groups(rewards, group_ids)
    if num_tokens.shape != rewards.shape:
        raise InputError(
            f"num_tokens has shape {tuple(num_tokens.shape)}, expected {tuple(rewards.shape)}."
        )
    lengths = num_tokens.double()
    total = groups.sum(lengths)
    if not bool((total > 0).all()):
        raise InputError("num_tokens are all 0 in a group; leave groups without a token out.")
    return groups.centered(groups.sum(lengths * groups.rewards) / total).float()


def maxrl_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns rewards relative to the group's mean, in units of that mean.

    Formula: A_i = (r_i - mean_g) / mean_g, 0 where mean_g is 0. For rewards of 0 and 1 the
    weights follow the likelihood of a correct answer: rare successes count more.

    Args:
        rewards: [N] float, >= 0.
        group_ids: as in `grpo_advantages`.

    Source: Tajwar et al., "Maximum Likelihood Reinforcement Learning" (2026).
    """
    groups = Groups(rewards, group_ids)
    if bool((rewards < 0).any()):
        i = int((rewards < 0).nonzero()[0])
        raise InputError(f"maxrl needs rewards >= 0; sequence {i} has {rewards[i].item()}.")
    return (groups.centered() / torch.where(groups.constant(), 1.0, groups.mean())).float()


def pass_at_k_advantages(
    rewards: Tensor, group_ids: Tensor, *, k: int, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Returns how much a sequence helps a random subset of k that contains it.

    Formula: with M the largest reward of a random k-subset of g, A_i = E[M | i in it] - E[M],
    divided by (std(M) + eps) if `normalize_by_std`. Exact, by counting subsets. For rewards of 0
    and 1, E[M] is the unbiased pass@k.

    Args:
        rewards, group_ids: as in `grpo_advantages`.
        k: 1 <= k <= the size of every group.
        normalize_by_std: divide by the standard deviation of M over subsets.
        eps: reward units.

    Source: Chen et al., "Pass@k Training for Adaptively Balancing Exploration and Exploitation of
    Large Reasoning Models" (2025), analytical form, here for any rewards.

    >>> pass_at_k_advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4).long(), k=2)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    groups = Groups(rewards, group_ids)
    smallest = int(groups.size.min()) if len(rewards) else k
    if not 1 <= k <= smallest:
        raise ConfigError(f"k must be in [1, size of the smallest group = {smallest}], got {k}.")
    advantages = torch.zeros_like(groups.rewards)
    for group in range(groups.num_groups):
        members = (groups.index == group).nonzero().squeeze(1)
        gain, std = _max_of_k(groups.rewards[members], k)
        advantages[members] = gain / (std + eps) if normalize_by_std else gain
    return torch.where(groups.constant(), 0.0, advantages).float()


def _max_of_k(rewards: Tensor, k: int) -> tuple[Tensor, float]:
    """Returns E[M | i] - E[M] for each i, and std(M), over the k-subsets of one group."""
    n = len(rewards)
    ordered, order = rewards.sort()
    subsets = math.comb(n, k)
    # number of k-subsets whose largest member is the j-th smallest, / all subsets
    top = ordered.new_tensor([math.comb(j, k - 1) / subsets for j in range(n)])
    mean = (top * ordered).sum()
    std = (top * (ordered - mean).square()).sum().sqrt()
    with_i = math.comb(n - 1, k - 1)
    is_top = ordered.new_tensor([math.comb(j, k - 1) / with_i for j in range(n)])
    # i is below the top j: k - 2 further members come from the j - 1 others below it
    below = ordered.new_tensor(
        [math.comb(j - 1, k - 2) / with_i if j and k > 1 else 0.0 for j in range(n)]
    )
    above_i = (below * ordered).flip(0).cumsum(0).flip(0) - below * ordered
    gain = torch.empty_like(rewards)
    gain[order] = is_top * ordered + above_i - mean
    return gain, float(std)


def raw_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the rewards as they are, to be whitened over the mini-batch.

    Formula: A_i = r_i; then `parallel.whitening.whiten`.

    Source: Hu, "REINFORCE++" (2025).
    """
    return Groups(rewards, group_ids).rewards.float()


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "opo": opo_advantages,
    "maxrl": maxrl_advantages,
    "pass_at_k": pass_at_k_advantages,
    # to be whitened over the mini-batch
    "reinforce_plus_plus": raw_advantages,
    "reinforce_plus_plus_baseline": dr_grpo_advantages,
}


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, estimator: str = "grpo", **settings: Any
) -> Tensor:
    """Returns the advantages of an estimator chosen by name, [N] fp32.

    The two `reinforce_plus_plus` ones still have to be whitened (`parallel.whitening.whiten`).

    Args:
        rewards, group_ids: as in `grpo_advantages`.
        estimator: one of `ADVANTAGE_ESTIMATORS`.
        **settings: of the estimator.

    Raises:
        ConfigError: unknown estimator or setting.
    """
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(
            f"unknown advantage estimator {estimator!r}; known: {', '.join(ADVANTAGE_ESTIMATORS)}."
        )
    function = ADVANTAGE_ESTIMATORS[estimator]
    try:
        return function(rewards, group_ids, **settings)
    except TypeError as error:
        raise ConfigError(f"advantage estimator {estimator!r}: {error}.") from error


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns [N] bool, False for sequences of a constant group, whose advantages are all 0.

    Leaving them out (`loss_mask & informative.unsqueeze(1)`, before the token weights are made)
    takes them out of the counts too: DAPO's dynamic sampling without resampling.

    >>> informative_groups(torch.tensor([1.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]))
    tensor([ True,  True, False, False])
    """
    return ~Groups(rewards, group_ids).constant()


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
