from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    group_advantages,
    grpo_advantages,
    informative_groups,
    maxrl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from megatron_rl_loss.parallel.whitening import whiten


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_give_exactly_zero(reward, size, normalize_by_std, dtype):
    rewards = torch.full((size,), reward, dtype=dtype)
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


LENGTHS = torch.tensor([3, 1, 4, 0, 5, 9, 2])


def test_rloo_subtracts_the_mean_of_the_others():
    def others(group, i):
        rest = group[:i] + group[i + 1 :]
        return group[i] - statistics.mean(rest)

    want = by_group(REWARDS, GROUP_IDS.tolist(), others)
    assert rloo_advantages(REWARDS, GROUP_IDS).tolist() == pytest.approx(want, abs=1e-6)


def test_opo_weights_the_baseline_by_length():
    want = []
    for i in range(7):
        members = [j for j in range(7) if GROUP_IDS[j] == GROUP_IDS[i]]
        total = sum(LENGTHS[j].item() for j in members)
        baseline = sum(LENGTHS[j].item() * REWARDS[j].item() for j in members) / total
        want.append(REWARDS[i].item() - baseline)
    got = opo_advantages(REWARDS, GROUP_IDS, num_tokens=LENGTHS)
    assert got.tolist() == pytest.approx(want, abs=1e-6)
    with pytest.raises(InputError, match="all 0 in a group"):
        opo_advantages(REWARDS, GROUP_IDS, num_tokens=torch.zeros(7))
    with pytest.raises(InputError, match="num_tokens has shape"):
        opo_advantages(REWARDS, GROUP_IDS, num_tokens=torch.ones(1))


def test_maxrl_divides_by_the_success_rate():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 0])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    want = [3, -1, -1, -1, 0.5, 0.5, -1, 0, 0]
    assert maxrl_advantages(rewards, ids).tolist() == pytest.approx(want)
    with pytest.raises(InputError, match="sequence 4 has -2"):
        maxrl_advantages(REWARDS, GROUP_IDS)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_counts_subsets(k, normalize_by_std):
    def by_listing(group, i):
        subsets = list(itertools.combinations(range(len(group)), k))
        best = [max(group[j] for j in subset) for subset in subsets]
        containing = [b for b, subset in zip(best, subsets, strict=True) if i in subset]
        gain = statistics.mean(containing) - statistics.mean(best)
        return gain / (statistics.pstdev(best) + 1e-6) if normalize_by_std else gain

    want = by_group(REWARDS, GROUP_IDS.tolist(), by_listing)
    got = pass_at_k_advantages(REWARDS, GROUP_IDS, k=k, normalize_by_std=normalize_by_std)
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_pass_at_k_of_binary_rewards_is_the_published_form():
    rewards = torch.tensor([1.0, 1, 0, 0, 0, 0])
    got = pass_at_k_advantages(rewards, torch.zeros(6, dtype=torch.long), k=3, eps=0.0)
    rate = 1 - math.comb(4, 3) / math.comb(6, 3)
    sigma = math.sqrt(rate * (1 - rate))
    positive = (1 - rate) / sigma
    negative = (1 - rate - math.comb(3, 2) / math.comb(5, 2)) / sigma
    assert got.tolist() == pytest.approx([positive] * 2 + [negative] * 4)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_refuses_more_than_a_group_holds(k):
    with pytest.raises(ConfigError, match="smallest group = 3"):
        pass_at_k_advantages(REWARDS, GROUP_IDS, k=k)


SETTINGS = {"opo": {"num_tokens": torch.tensor([1, 2, 3])}, "pass_at_k": {"k": 2}}


@pytest.mark.parametrize(
    "estimator", [name for name in ADVANTAGE_ESTIMATORS if name != "reinforce_plus_plus"]
)
@pytest.mark.parametrize("reward", [0.35, 0.1, 1 / 3])
def test_every_estimator_gives_exactly_zero_for_a_constant_group(estimator, reward):
    settings = SETTINGS.get(estimator, {})
    got = group_advantages(
        torch.full((3,), reward, dtype=torch.float64),
        torch.zeros(3, dtype=torch.long),
        estimator=estimator,
        **settings,
    )
    assert torch.equal(got, torch.zeros(3))


def test_estimators_by_name():
    ids = torch.tensor([0, 0, 1])
    rewards = torch.tensor([1.0, 0.5, 0.25])
    assert group_advantages(rewards, ids, estimator="reinforce_plus_plus").tolist() == [
        1,
        0.5,
        0.25,
    ]
    assert group_advantages(rewards, ids, estimator="dr_grpo").tolist() == [0.25, -0.25, 0]
    with pytest.raises(ConfigError, match="known: grpo, dr_grpo"):
        group_advantages(rewards, ids, estimator="gae")
    with pytest.raises(ConfigError, match="num_tokens"):
        group_advantages(rewards, ids, estimator="opo")
    with pytest.raises(ConfigError, match="sigma"):
        group_advantages(rewards, ids, sigma=1)


def test_constant_groups_are_not_informative():
    got = informative_groups(torch.tensor([1.0, 0, 0.35, 0.35, 1]), torch.tensor([4, 4, 2, 2, 0]))
    assert got.tolist() == [True, True, False, False, False]


def test_whitening_is_over_trained_tokens():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    values = torch.tensor([[1.0, 2.0, math.nan], [9.0, 9.0, 9.0], [5.0, math.inf, 4.0]])
    trained = [1.0, 2.0, 5.0, 4.0]
    mean, std = statistics.mean(trained), statistics.stdev(trained)
    got = whiten(values, mask)
    assert got[mask].tolist() == pytest.approx([(x - mean) / std for x in trained])
    assert not got[~mask].any()
    kept = whiten(values, mask, shift_mean=False)
    assert kept[mask].tolist() == pytest.approx([(x - mean) / std + mean for x in trained])


def test_whitening_per_row_advantages_and_nothing():
    mask = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
    got = whiten(torch.tensor([1.0, -1.0]), mask)
    std = statistics.stdev([1, 1, -1])
    assert got.flatten().tolist() == pytest.approx([2 / 3 / std, 2 / 3 / std, -4 / 3 / std, 0])
    assert not whiten(torch.full((2,), 0.35), mask).any()
    assert not whiten(torch.ones(2), torch.zeros_like(mask)).any()
