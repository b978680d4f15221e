from __future__ import annotations

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.ops.preferences import dpo_advantages
from megatron_rl_loss.parallel.token_weights import token_weights

PAIRS = torch.tensor([4, 9, 4, 9, 2, 2])
CHOSEN = torch.tensor([True, False, False, True, False, True])
BETA = 0.3


def policy():
    """Six responses of six positions over five tokens: logits, labels, mask, reference sums."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (6, 6, 1), generator=generator)
    mask = torch.rand(6, 6, generator=generator) < 0.7
    return logits, labels, mask, -3 + torch.randn(6, generator=generator, dtype=torch.float64)


def log_probs_of(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels)[..., 0]


@pytest.mark.parametrize("cut", [6, 2, 1])
def test_the_policy_gradient_is_that_of_the_dpo_loss_for_any_cut(cut):
    logits, labels, mask, ref_sums = policy()
    whole = logits.clone().requires_grad_()
    sums = (log_probs_of(whole, labels) * mask).sum(1)
    gaps = sums - ref_sums
    want = 0.0
    for pair in PAIRS.unique():
        chosen, rejected = gaps[(PAIRS == pair) & CHOSEN], gaps[(PAIRS == pair) & ~CHOSEN]
        want = want - torch.sigmoid(BETA * (chosen - rejected)).log().sum() / 3
    want.backward()

    advantages, losses = dpo_advantages(sums, ref_sums, PAIRS, CHOSEN, beta=BETA)
    assert losses[CHOSEN].mean().item() == pytest.approx(want.item(), abs=1e-6)
    weights = token_weights(mask, "seq_mean_token_sum_norm", max_seq_len=1)
    objective = Objective("policy_gradient")
    ours = logits.clone().requires_grad_()
    for start in range(0, 6, cut):  # pairs end up in different micro-batches
        part = slice(start, start + cut)
        given = {"advantages": advantages[part, None].expand(-1, 6)}
        log_probs = log_probs_of(ours[part], labels[part])
        objective(log_probs, None, given, mask[part], weights[part])[0].backward()
    torch.testing.assert_close(ours.grad, whole.grad, rtol=1e-6, atol=1e-9)


def test_pairs_that_are_not_whole_are_refused():
    sums = torch.zeros(6)
    with pytest.raises(InputError, match="exactly one chosen and one rejected"):
        dpo_advantages(sums[:5], sums[:5], PAIRS[:5], CHOSEN[:5])
    with pytest.raises(InputError, match="exactly one chosen and one rejected"):
        dpo_advantages(sums, sums, PAIRS, torch.ones(6, dtype=torch.bool))
    with pytest.raises(InputError, match=r"must be \[N\]"):
        dpo_advantages(sums[:5], sums, PAIRS, CHOSEN)
    with pytest.raises(InputError, match="must be bool"):
        dpo_advantages(sums, sums, PAIRS, CHOSEN.long())
    with pytest.raises(ConfigError, match="beta must be > 0"):
        dpo_advantages(sums, sums, PAIRS, CHOSEN, beta=0.0)
