from __future__ import annotations

import math
import statistics

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.ops.advantages import grpo_advantages


def by_group(rewards, group_ids, f):
    """Applies f(list of the group's rewards, index in the group) in plain Python floats."""
    values = []
    for i, group in enumerate(group_ids):
        members = [j for j, other in enumerate(group_ids) if other == group]
        values.append(f([float(rewards[j]) for j in members], members.index(i)))
    return values


REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.5, -2.0, 1.0, 3.0], dtype=torch.float64)
GROUP_IDS = torch.tensor([5, 9, 5, 9, 9, 5, 9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grpo_is_the_z_score_of_the_group(dtype):
    def z_score(group, i):
        return (group[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)

    want = by_group(REWARDS, GROUP_IDS.tolist(), z_score)
    got = grpo_advantages(REWARDS.to(dtype), GROUP_IDS)
    assert got.dtype is torch.float32
    assert got.tolist() == pytest.approx(want, abs=1e-6)


def test_dr_grpo_only_subtracts_the_mean():
    want = by_group(REWARDS, GROUP_IDS.tolist(), lambda g, i: g[i] - statistics.mean(g))
    got = grpo_advantages(REWARDS, GROUP_IDS, normalize_by_std=False)
    assert got.tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("reward", [0.35, 0.1, -1 / 3, 1e8 + 0.3])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_constant_groups_give_exactly_zero(reward, size, normalize_by_std):
    rewards = torch.full((size,), reward)
    got = grpo_advantages(
        rewards, torch.zeros(size, dtype=torch.long), normalize_by_std=normalize_by_std, eps=0.0
    )
    assert torch.equal(got, torch.zeros(size))


def test_nearly_constant_groups_stay_bounded():
    rewards = torch.tensor([0.35, 0.35, 0.35 + 1e-7])
    got = grpo_advantages(rewards, torch.zeros(3, dtype=torch.long))
    assert got.abs().max() < 1.2


def test_order_of_the_sequences_changes_nothing():
    order = torch.tensor([6, 2, 0, 1, 5, 4, 3])
    got = grpo_advantages(REWARDS[order], GROUP_IDS[order])
    torch.testing.assert_close(got, grpo_advantages(REWARDS, GROUP_IDS)[order])


def test_no_sequences_give_no_advantages():
    assert grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_rewards_are_named(bad):
    with pytest.raises(InputError, match="sequence 1 is"):
        grpo_advantages(torch.tensor([0.0, bad]), torch.zeros(2, dtype=torch.long))


def test_wrong_shapes_are_refused():
    ids = torch.zeros(2, dtype=torch.long)
    with pytest.raises(InputError, match="one per sequence"):
        grpo_advantages(torch.zeros(2, 2), ids)
    with pytest.raises(InputError, match=r"integer \(3,\)"):
        grpo_advantages(torch.zeros(3), ids)
    with pytest.raises(InputError, match="integer"):
        grpo_advantages(torch.zeros(2), torch.zeros(2))
