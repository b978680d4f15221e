"""PPO with a critic through the main job: the same numbers on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl_loss.rollouts.files import write_rollouts
from megatron_rl_loss.rollouts.rollout import Rollout
from megatron_rl_loss.train import main
from tests.mcore import jobs
from tests.mcore.test_train import model_folder

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


@pytest.fixture(scope="module")
def arguments(model_folder, rollout_file) -> list[str]:  # noqa: F811
    """Of a run, but for run.dir."""
    return [
        "configs/ppo_critic_example.yaml",
        "run.steps=4",
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
        "logging.plot=false",
    ]


@pytest.fixture(scope="module")
def one_rank(arguments, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("one_rank")
    jobs.run([*arguments, f"run.dir={folder}"], folder / "log")
    return jobs.metrics(folder)


def test_policy_and_critic_train_alike_on_one_rank_and_two(one_rank, arguments, tmp_path):
    jobs.run([*arguments, f"run.dir={tmp_path}"], tmp_path / "log", ranks=2)
    for a, b in zip(one_rank, jobs.metrics(tmp_path), strict=True):
        assert set(a) == set(b)
        for name in NUMBERS:
            assert b[name] == pytest.approx(a[name], rel=5e-5, abs=1e-6), name


def test_the_critic_learns_and_the_coefficients_move(one_rank):
    first, second, third, _ = one_rank
    assert first["critic_learning_rate"] == pytest.approx(1e-2)
    assert first["critic_value_mean"] != second["critic_value_mean"]
    assert second["reward_kl"] != 0.0 and third["reward_kl_coef"] != first["reward_kl_coef"]
    assert second["entropy_coef"] > first["entropy_coef"] == 0.0


def test_a_resumed_run_goes_on_with_critic_and_coefficients(one_rank, arguments, tmp_path):
    start = [*arguments, f"run.dir={tmp_path}", "checkpoint.interval=2"]
    jobs.run([*start, "run.steps=2"], tmp_path / "log")
    jobs.run(start, tmp_path / "log")
    assert "resuming from" in (tmp_path / "log").read_text()
    assert jobs.metrics(tmp_path) == one_rank


def test_settings_that_do_not_fit_a_critic_are_refused(capsys):
    wrong = ["reward.kl_coef=0.1", "loss.kl_target=1", "critic.discount=2"]
    assert main(["configs/demo.yaml", "--dry-run", *wrong]) == 2
    said = capsys.readouterr().err
    assert "reward.kl_coef: puts the KL into the reward of each token" in said
    assert "loss.kl_target: needs loss.kl_coef > 0" in said
    assert "critic.discount: must be in [0, 1], got 2" in said
