"""PPO with a critic in the main job, and coefficients that follow a measured quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .errors import ConfigError
from .mcore.forward_step import ForwardStep
from .mcore.groups import ParallelGroups
from .mcore.planning import Plan
from .mcore.value_step import make_value_step
from .mcore.value_training import Critic, mean_over_step, token_rewards
from .ops.coefficients import AdaptiveEntropyCoef, AdaptiveKLCoef
from .rollouts.rollout import Rollout
from .types import MicroBatch

Cut = tuple[list[MicroBatch], Plan]  # what `cut_mini_batch` returns


@dataclass
class RewardKL:
    """The KL to the reference as part of the rewards.

    Attributes:
        coef: reward units per nat, now.
        estimator: one of `ops.kl.KL_ESTIMATORS`.
        adaptive: changes `coef` after each step; None: it stays.
    """

    coef: float
    estimator: str = "k1"
    adaptive: AdaptiveKLCoef | None = None


@dataclass
class PPO:
    """Advantages and returns from a critic, per token.

    Attributes:
        critic: trained beside the policy, one optimizer step for each of its.
        reward_kl: None: rewards as they are.
    """

    critic: Critic
    reward_kl: RewardKL | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Log-probs that must be in the micro-batches beside those that the loss reads."""
        return ("old_log_probs", "ref_log_probs") if self.reward_kl else ()

    def prepare(
        self, cuts: Sequence[Cut], parts: Sequence[Sequence[Rollout]], groups: ParallelGroups
    ) -> dict[str, float]:
        """Adds old values, advantages and returns to a step's micro-batches; returns metrics.

        Args:
            cuts: of each mini-batch.
            parts: the rollouts of each mini-batch.

        Raises:
            ConfigError: a rollout has no reward.
        """
        kl = self.reward_kl
        settings: dict[str, Any] = (
            {} if kl is None else {"kl_coef": kl.coef, "kl_estimator": kl.estimator}
        )
        made, is_cut = [], []
        for (micro_batches, plan), rollouts in zip(cuts, parts, strict=True):
            rows = rows_of(micro_batches, plan, rollouts, groups)
            is_cut.append([cut for _, cut in rows])
            made.append(
                [
                    token_rewards(batch, rewards, **settings)
                    for batch, (rewards, _) in zip(micro_batches, rows, strict=True)
                ]
            )
        mini_batches = [micro_batches for micro_batches, _ in cuts]
        rewards = [[reward for reward, _ in part] for part in made]
        self.critic.add_advantages(mini_batches, rewards, is_cut, groups)
        if kl is None:
            return {}
        flat = [batch for micro_batches in mini_batches for batch in micro_batches]
        values = [value for part in made for _, value in part]
        return mean_over_step("reward_kl", values, flat, groups) | {"reward_kl_coef": kl.coef}


def make_ppo(
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    *,
    value_clip: float | None,
    kl_coef: float,
    kl_estimator: str,
    kl_target: float | None,
    kl_horizon: float,
    **estimation: Any,
) -> PPO:
    """Returns PPO with a critic.

    Args:
        chunks, optimizer, scheduler: of the critic.
        value_clip: see `clipped_value_loss`.
        kl_coef, kl_estimator: KL in the rewards; 0: none.
        kl_target, kl_horizon: see `AdaptiveKLCoef`; None: kl_coef stays.
        **estimation: further attributes of `Critic`.
    """
    critic = Critic(
        chunks, optimizer, scheduler, make_value_step(value_clip=value_clip), **estimation
    )
    if not kl_coef:
        return PPO(critic)
    adaptive = None if kl_target is None else AdaptiveKLCoef(kl_coef, kl_target, kl_horizon)
    return PPO(critic, RewardKL(kl_coef, kl_estimator, adaptive))


def rows_of(
    micro_batches: Sequence[MicroBatch],
    plan: Plan,
    rollouts: Sequence[Rollout],
    groups: ParallelGroups,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns of each micro-batch the rewards [rows] and whether the response was cut short."""
    if any(rollout.reward is None for rollout in rollouts):
        raise ConfigError(
            "advantage.estimator is 'gae', but a rollout has no 'reward'; the critic learns from "
            "rewards."
        )
    rows = []
    for batch, indices in zip(micro_batches, plan.micro_batches[groups.dp.rank()], strict=True):
        rewards = torch.zeros(len(batch["tokens"]))
        is_cut = torch.zeros(len(rewards), dtype=torch.bool)
        for row, i in enumerate(indices):
            rewards[row] = float(rollouts[i].reward or 0.0)
            is_cut[row] = not rollouts[i].metadata.get("finished", True)
        rows.append((rewards, is_cut))
    return rows


@dataclass
class AdaptiveCoefs:
    """The loss's coefficients that change after each step of a run.

    Attributes:
        kl: of the loss's KL term, after the metric "kl"; None: it stays.
        entropy: of the entropy bonus, after the metric "entropy"; None: it stays.
        reward_kl: of the KL in the rewards, after the metric "reward_kl".
    """

    kl: AdaptiveKLCoef | None = None
    entropy: AdaptiveEntropyCoef | None = None
    reward_kl: RewardKL | None = None

    def update(
        self, forward_step: ForwardStep, metrics: dict[str, float], num_sequences: int
    ) -> dict[str, float]:
        """Changes the coefficients for the next step; returns those of this one, as metrics."""
        objective, changes = forward_step.objective, {}
        used = {}
        if self.kl is not None:
            used["kl_coef"] = objective.kl_coef
            changes["kl_coef"] = self.kl.update(metrics["kl"], num_sequences=num_sequences)
        if self.entropy is not None:
            used["entropy_coef"] = objective.entropy_coef
            changes["entropy_coef"] = self.entropy.update(metrics["entropy"])
        forward_step.objective = replace(objective, **changes)
        reward = self.reward_kl
        if reward is not None and reward.adaptive is not None:
            reward.coef = reward.adaptive.update(metrics["reward_kl"], num_sequences=num_sequences)
        return used

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run must know."""
        parts = {"kl": self.kl, "entropy": self.entropy}
        parts["reward_kl"] = None if self.reward_kl is None else self.reward_kl.adaptive
        return {name: vars(part).copy() for name, part in parts.items() if part is not None}

    def load_state(self, state: dict[str, Any], forward_step: ForwardStep) -> None:
        """Takes over the values of `state`; a coefficient that is not in it starts anew."""
        changes = {}
        if self.kl is not None and "kl" in state:
            self.kl.value = changes["kl_coef"] = state["kl"]["value"]
        if self.entropy is not None and "entropy" in state:
            self.entropy.inner = state["entropy"]["inner"]
            self.entropy.value = changes["entropy_coef"] = state["entropy"]["value"]
        forward_step.objective = replace(forward_step.objective, **changes)
        reward = self.reward_kl
        if reward is not None and reward.adaptive is not None and "reward_kl" in state:
            reward.coef = reward.adaptive.value = state["reward_kl"]["value"]


def make_coefs(
    reward_kl: RewardKL | None,
    *,
    kl_coef: float,
    kl_target: float | None,
    kl_horizon: float,
    entropy_coef: float,
    entropy_target: float | None,
    entropy_step: float,
    entropy_coef_max: float,
) -> AdaptiveCoefs:
    """Returns the coefficients that follow a target; those without one stay as they are."""
    kl = entropy = None
    if kl_target is not None:
        kl = AdaptiveKLCoef(kl_coef, kl_target, kl_horizon)
    if entropy_target is not None:
        entropy = AdaptiveEntropyCoef(entropy_coef, entropy_target, entropy_step, entropy_coef_max)
    return AdaptiveCoefs(kl, entropy, reward_kl)
