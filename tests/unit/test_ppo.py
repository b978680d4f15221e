"""A critic's advantages for a step's micro-batches, and coefficients that follow a target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl_loss.errors import ConfigError
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.mcore import value_training
from megatron_rl_loss.mcore.value_training import Critic, token_rewards
from megatron_rl_loss.ops.coefficients import AdaptiveEntropyCoef, AdaptiveKLCoef
from megatron_rl_loss.ppo import PPO, AdaptiveCoefs, RewardKL, make_coefs, rows_of
from megatron_rl_loss.rollouts.rollout import Rollout

GROUPS = SimpleNamespace(dp=None)
DISCOUNT, LAMBDA = 0.9, 0.8


def micro_batches() -> list[dict[str, torch.Tensor]]:
    """Two mini-batches of one micro-batch each, of different widths; the last row is a filler."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows, width in ((2, 6), (2, 4)):
        mask = torch.zeros(rows, width, dtype=torch.bool)
        mask[0, 1 : width - 1] = True
        if width == 6:
            mask[1, 2:4] = True
            mask[0, 3] = False
        batches.append(
            {
                "tokens": torch.zeros(rows, width, dtype=torch.int64),
                "loss_mask": mask,
                "old_log_probs": torch.randn(rows, width, generator=generator),
                "ref_log_probs": torch.randn(rows, width, generator=generator),
                "values": torch.randn(rows, width, generator=generator),
            }
        )
    return batches


def slow_advantages(batch, rewards, cut, kl_coef, bootstrap):
    """(row, position) -> (advantage, return), by the recursion, in Python."""
    result = {}
    for row, mask in enumerate(batch["loss_mask"].tolist()):
        at = [t for t, trained in enumerate(mask) if trained]
        advantage, after = 0.0, 0.0
        if at and bootstrap and cut[row]:
            after = batch["values"][row, at[-1] + 1].item()
        for t in reversed(at):
            gap = batch["old_log_probs"][row, t] - batch["ref_log_probs"][row, t]
            reward = -kl_coef * gap.item() + (rewards[row].item() if t == at[-1] else 0.0)
            value = batch["values"][row, t].item()
            advantage = reward + DISCOUNT * after - value + DISCOUNT * LAMBDA * advantage
            result[row, t] = advantage, advantage + value
            after = value
    return result


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_advantages_and_returns_equal_the_recursion_over_a_whole_step(
    monkeypatch, kl_coef, whiten, bootstrap
):
    monkeypatch.setattr(
        value_training, "token_values", lambda chunks, batches: [b["values"] for b in batches]
    )
    critic = Critic(
        [], None, None, None, DISCOUNT, LAMBDA, whiten_advantages=whiten, bootstrap=bootstrap
    )
    batches = micro_batches()
    rewards = [torch.tensor([1.0, -0.5]), torch.tensor([2.0, 0.0])]
    cut = [torch.tensor([True, False]), torch.tensor([True, False])]
    shaped = [
        [token_rewards(b, r, kl_coef=kl_coef)[0]] for b, r in zip(batches, rewards, strict=True)
    ]
    critic.add_advantages([[b] for b in batches], shaped, [[c] for c in cut], GROUPS)
    want = [
        slow_advantages(b, r, c, kl_coef, bootstrap)
        for b, r, c in zip(batches, rewards, cut, strict=True)
    ]
    flat = torch.tensor([a for part in want for a, _ in part.values()]).double()
    mean, std = (flat.mean(), flat.std()) if whiten else (0.0, 1.0)
    for batch, part in zip(batches, want, strict=True):
        for (row, t), (advantage, target) in part.items():
            got = batch["advantages"][row, t].item(), batch["returns"][row, t].item()
            assert got == pytest.approx((float((advantage - mean) / std), target), abs=1e-5)
        for name in ("advantages", "returns"):
            assert not batch[name][~batch["loss_mask"]].any()
        assert torch.equal(batch["old_values"], batch["values"])


def test_rows_get_the_rewards_of_their_rollouts_and_fillers_get_none():
    rollouts = [
        Rollout([1], [2], reward=1.0, metadata={"finished": False}),
        Rollout([1], [2], reward=2.0, metadata={"finished": True}),
        Rollout([1], [2], reward=3.0),
    ]
    plan = SimpleNamespace(micro_batches=[[], [[2, 0], [1]]])
    groups = SimpleNamespace(dp=SimpleNamespace(rank=lambda: 1))
    batches = [{"tokens": torch.zeros(2, 3)}, {"tokens": torch.zeros(2, 3)}]
    rows = rows_of(batches, plan, rollouts, groups)
    assert [rewards.tolist() for rewards, _ in rows] == [[3.0, 1.0], [2.0, 0.0]]
    assert [cut.tolist() for _, cut in rows] == [[False, True], [False, False]]
    with pytest.raises(ConfigError, match="'gae', but a rollout has no 'reward'"):
        rows_of(batches, plan, [*rollouts[:2], Rollout([1], [2], advantage=1.0)], groups)


def test_the_kl_in_the_rewards_asks_for_both_log_probs():
    assert PPO(None).needs == ()
    assert PPO(None, RewardKL(0.1)).needs == ("old_log_probs", "ref_log_probs")


def test_coefficients_follow_the_metrics_and_come_back_after_a_resume():
    step = SimpleNamespace(objective=Objective(kl_coef=0.1, entropy_coef=0.02))
    reward = RewardKL(0.2, "k1", AdaptiveKLCoef(0.2, target=0.5, horizon=10))
    coefs = AdaptiveCoefs(
        AdaptiveKLCoef(0.1, target=1.0, horizon=100), AdaptiveEntropyCoef(0.02, 2.0, 0.01), reward
    )
    metrics = {"kl": 5.0, "entropy": 1.0, "reward_kl": 0.45}
    used = coefs.update(step, metrics, 10)
    assert used == {"kl_coef": 0.1, "entropy_coef": 0.02}
    assert step.objective.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert step.objective.entropy_coef == pytest.approx(0.03)
    assert reward.coef == pytest.approx(0.2 * 0.9)

    later = SimpleNamespace(objective=Objective(kl_coef=0.1, entropy_coef=0.02))
    fresh = make_coefs(
        RewardKL(0.2, "k1", AdaptiveKLCoef(0.2, target=0.5, horizon=10)),
        kl_coef=0.1, kl_target=1.0, kl_horizon=100,
        entropy_coef=0.02, entropy_target=2.0, entropy_step=0.01, entropy_coef_max=1.0,
    )  # fmt: skip
    fresh.load_state(coefs.state(), later)
    assert later.objective == step.objective
    assert fresh.state() == coefs.state()
    assert fresh.reward_kl.coef == reward.coef


def test_without_targets_nothing_changes():
    step = SimpleNamespace(objective=Objective(kl_coef=0.1))
    before = step.objective
    assert AdaptiveCoefs().update(step, {}, 4) == {}
    assert step.objective == before and AdaptiveCoefs().state() == {}
