from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.ops.gae import gae


def reference(steps, discount, gae_lambda, bootstrap=0.0):
    """Steps are (reward, value) of the trained tokens of one sequence, in order."""
    advantages, advantage, next_value = [], 0.0, bootstrap
    for reward, value in reversed(steps):
        delta = reward + discount * next_value - value
        advantage = delta + discount * gae_lambda * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]


def case(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.6
    return rewards, values, mask


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0), (0, 1)])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
def test_gaps_are_skipped(length, discount, gae_lambda):
    rewards, values, mask = case(4, length)
    mask[1] = False
    dirty = [torch.where(mask, x, math.nan) for x in (rewards, values)]
    advantages, returns = gae(*dirty, mask, discount=discount, gae_lambda=gae_lambda)
    for row in range(4):
        at = mask[row]
        steps = list(zip(rewards[row, at].tolist(), values[row, at].tolist(), strict=True))
        want = reference(steps, discount, gae_lambda)
        assert advantages[row, at].tolist() == pytest.approx(want, abs=1e-5)
        assert returns[row, at].tolist() == pytest.approx(
            [a + v for a, (_, v) in zip(want, steps, strict=True)], abs=1e-5
        )
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_packed_sequences_do_not_see_each_other():
    rewards, values, mask = case(1, 20)
    mask[0, 7:11] = False  # one sequence has no trained token
    bounds = [0, 7, 11, 12, 20]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(bounds).diff())[None]
    packed = gae(rewards, values, mask, discount=0.9, gae_lambda=0.8, segment_ids=ids)
    for start, end in itertools.pairwise(bounds):
        alone = gae(
            rewards[:, start:end],
            values[:, start:end],
            mask[:, start:end],
            discount=0.9,
            gae_lambda=0.8,
        )
        for a, b in zip(packed, alone, strict=True):
            torch.testing.assert_close(a[:, start:end], b)


def test_a_cut_sequence_takes_the_bootstrap_at_its_last_trained_token():
    rewards, values, mask = case(3, 9)
    bootstrap = torch.full_like(values, math.nan)
    want = []
    for row in range(3):
        at = mask[row]
        last = int(at.nonzero()[-1])
        bootstrap[row, last] = row + 0.5
        steps = list(zip(rewards[row, at].tolist(), values[row, at].tolist(), strict=True))
        want += reference(steps, 0.9, 0.8, row + 0.5)
    got, _ = gae(rewards, values, mask, discount=0.9, gae_lambda=0.8, bootstrap_values=bootstrap)
    assert got[mask].tolist() == pytest.approx(want, abs=1e-5)


def test_lambda_one_gives_the_sum_of_later_rewards():
    rewards, values, mask = case(2, 11)
    _, returns = gae(rewards, values, mask, gae_lambda=1.0)
    later = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, torch.where(mask, later, 0.0), rtol=1e-5, atol=1e-5)


def test_long_rows_stay_accurate():
    rewards, values, mask = case(1, 5000)
    got, _ = gae(rewards, values, mask, discount=1.0, gae_lambda=1.0)
    steps = list(zip(rewards[mask].tolist(), values[mask].tolist(), strict=True))
    assert got[mask].tolist() == pytest.approx(reference(steps, 1.0, 1.0), abs=1e-4)


def test_wrong_input_is_refused():
    rewards, values, mask = case(2, 2)
    with pytest.raises(ConfigError, match="gae_lambda"):
        gae(rewards, values, mask, gae_lambda=1.5)
    with pytest.raises(ConfigError, match="discount"):
        gae(rewards, values, mask, discount=math.nan)
    with pytest.raises(InputError, match="rewards has shape"):
        gae(rewards[:, 0], values, mask)
    with pytest.raises(InputError, match="bool"):
        gae(rewards, values, mask.float())
