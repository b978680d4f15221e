"""PPO with a critic through the main job: the same numbers on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl_loss.rollouts.files import write_rollouts
from megatron_rl_loss.rollouts.rollout import Rollout
from tests.mcore.test_train import command, metrics_of, model_folder

__all__ = ["model_folder"]
NUMBERS = [
    "loss", "kl", "entropy", "grad_norm", "reward_kl", "reward_kl_coef", "entropy_coef",
    "critic_loss", "critic_grad_norm", "critic_value_mean", "critic_return_mean",
    "critic_explained_variance", "critic_value_clip_fraction",
]  # fmt: skip


@pytest.fixture(scope="module")
def rollout_file(tmp_path_factory) -> Path:
    """Responses with rewards, some cut short; no groups."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for i in range(16):
        prompt, response = (
            torch.randint(0, 60, (n,), generator=generator).tolist() for n in (3 + i % 3, 2 + i % 5)
        )
        rollouts.append(Rollout(prompt, response, reward=0.1 * i, metadata={"finished": i % 3 > 0}))
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_rollouts(path, rollouts)
    return path


def test_the_main_job_trains_policy_and_critic_alike_on_one_rank_and_two(
    model_folder,  # noqa: F811
    rollout_file,
    tmp_path,
):
    runs = []
    for mode in ("one rank", "two data ranks"):
        folder = tmp_path / mode.replace(" ", "_")
        result = command(
            mode,
            "configs/ppo_critic_example.yaml",
            f"run.dir={folder}",
            "run.steps=3",
            f"model.path={model_folder}",
            f"rollouts.path={rollout_file}",
            "rollouts.per_step=8",
            "batch.micro_batch_size=2",
            "batch.mini_batches_per_step=2",
            "reward.kl_coef=0.1",
            "reward.kl_target=0.01",
            "reward.kl_horizon=40",
            "loss.entropy_target=10.0",
            "critic.bootstrap=true",
            "critic.lr=1e-2",
            "optimizer.lr=1e-3",
            "optimizer.eps=1e-3",
        )
        assert result.returncode == 0, result.stderr[-4000:]
        runs.append(metrics_of(folder))
    for a, b in zip(*runs, strict=True):
        assert set(a) == set(b)
        for name in NUMBERS:
            assert b[name] == pytest.approx(a[name], rel=5e-5, abs=1e-6), name
    first, second, third = runs[0]
    assert first["critic_learning_rate"] == pytest.approx(1e-2)
    assert first["critic_value_mean"] != second["critic_value_mean"]
    assert second["reward_kl"] != 0.0 and third["reward_kl_coef"] != first["reward_kl_coef"]
    assert second["entropy_coef"] > first["entropy_coef"] == 0.0


def test_settings_that_do_not_fit_a_critic_are_refused():
    result = command(
        "one rank", "configs/demo.yaml", "--dry-run", "reward.kl_coef=0.1", "loss.kl_target=1",
        "critic.discount=2",
    )  # fmt: skip
    assert result.returncode == 2
    assert "reward.kl_coef: puts the KL into the reward of each token" in result.stderr
    assert "loss.kl_target: needs loss.kl_coef > 0" in result.stderr
    assert "critic.discount: must be in [0, 1], got 2" in result.stderr
