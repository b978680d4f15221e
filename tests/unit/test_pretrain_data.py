"""The data set behind Megatron's `pretrain()`: weights of whole global batches, in any order."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError, RolloutError
from megatron_rl_loss.ops.advantages import grpo_advantages
from megatron_rl_loss.pretrain import (
    RolloutDataset,
    add_arguments,
    check_arguments,
    make_datasets,
    read_config,
    write_metrics,
)
from megatron_rl_loss.report import read_metrics
from megatron_rl_loss.rollouts.files import RolloutFiles, write_rollouts
from megatron_rl_loss.rollouts.rollout import Rollout

SIZE = 4
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def path(tmp_path):
    rollouts = [
        Rollout([9], list(range(length)), reward=float(i % 3), group_id=i // 2)
        for i, length in enumerate(LENGTHS)
    ]
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    return tmp_path / "r.jsonl"


def dataset(path, **changes):
    settings = {
        "num_samples": 16,
        "global_batch_size": SIZE,
        "seq_length": 10,
        "estimator": lambda rewards, group_ids, num_tokens: grpo_advantages(rewards, group_ids),
        "shuffle_seed": None,
        "reduction": "sequence_mean",
    }
    return RolloutDataset(RolloutFiles(path), **{**settings, **changes})


def test_weights_are_those_of_the_whole_global_batch_whoever_asks(path):
    for order in (range(8), reversed(range(8)), (5, 0, 6, 1)):
        samples = dataset(path)
        for i in order:
            weights = samples[i]["loss_weights"]
            expected = [1 / (SIZE * LENGTHS[i])] * LENGTHS[i] + [0.0] * (10 - LENGTHS[i])
            torch.testing.assert_close(weights, torch.tensor(expected))


def test_advantages_compare_within_the_groups_of_a_global_batch(path):
    samples = dataset(path)
    advantages = [float(samples[i]["advantages"][0]) for i in range(4)]
    assert advantages[0] == pytest.approx(-advantages[1]) and advantages[0] < 0
    assert advantages[2] == pytest.approx(-advantages[3]) and advantages[2] > 0


def test_samples_have_one_shape_and_the_padding_is_not_trained(path):
    sample = dataset(path)[2]
    assert {v.shape for k, v in sample.items() if k != "group_ids"} == {(10,)}
    assert sample["loss_mask"].tolist() == [True] * 3 + [False] * 7


def test_passes_follow_each_other_and_each_rollout_comes_once_in_each(path):
    samples = dataset(path, shuffle_seed=7)
    passes = [[int(samples[i]["loss_mask"].sum()) for i in range(k, k + 8)] for k in (0, 8)]
    assert sorted(passes[0]) == sorted(passes[1]) == LENGTHS
    assert passes[0] != passes[1]


def test_rollout_log_probs_stand_for_the_old_ones_only_if_they_are_there(path, tmp_path):
    with pytest.raises(ConfigError, match="no 'rollout_log_probs'"):
        dataset(path, rollout_is_old=True)[0]
    rollouts = [Rollout([9], [1, 2], reward=1.0, rollout_log_probs=[-1.0, -2.0])] * SIZE
    write_rollouts(tmp_path / "with.jsonl", rollouts)
    sample = dataset(tmp_path / "with.jsonl", rollout_is_old=True)[0]
    assert sample["old_log_probs"][:2].tolist() == [-1.0, -2.0]


def test_a_loss_without_advantages_needs_none(tmp_path):
    write_rollouts(tmp_path / "sft.jsonl", [Rollout([9], [1, 2], reward=1.0)] * SIZE)
    sample = dataset(tmp_path / "sft.jsonl", estimator=None, reads_advantages=False)[0]
    assert sample["loss_weights"][:3].tolist() == [1 / (2 * SIZE), 1 / (2 * SIZE), 0.0]
    args = parsed(tmp_path / "sft.jsonl", "loss.name=cross_entropy", "advantage.estimator=none")
    samples, _, _ = make_datasets(args, [SIZE, 0, 0])
    assert samples[0]["advantages"].tolist() == [0.0] * 10


def test_missing_rewards_and_too_few_rollouts_are_named(path, tmp_path):
    with pytest.raises(ConfigError, match="4 of 4 rollouts have no 'advantage'"):
        dataset(path, estimator=None)[0]
    with pytest.raises(InputError, match="there are 8 rollouts, fewer than --global-batch-size 16"):
        dataset(path, global_batch_size=16)


def test_a_rollout_longer_than_the_sequence_is_named_by_line(path):
    with pytest.raises(RolloutError, match="line 8.*more than the sequence length, 8"):
        RolloutFiles(path, max_tokens=8)


def arguments(**changes):
    known = {
        "dataloader_type": "single",
        "rampup_batch_size": None,
        "eval_iters": 0,
        "global_batch_size": 8,
        "consumed_train_samples": 16,
        "perform_rl_step": False,
    }
    return SimpleNamespace(**{**known, **changes})


def parsed(path, *settings):
    """Returns Megatron's arguments with ours, as its parser would."""
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--mrl-rollouts", str(path), "--mrl-config", *settings])
    known = arguments(eval_iters=args.eval_iters, global_batch_size=SIZE)
    vars(args).update(vars(known), seed=5, seq_length=10, vocab_size=61)
    return args


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic: must be single"),
        ({"rampup_batch_size": [2, 2, 100]}, "--rampup-batch-size"),
        ({"eval_iters": 10}, "--eval-iters 10: must be 0"),
        ({"consumed_train_samples": 12}, "12 samples are consumed"),
        ({"perform_rl_step": True}, "--perform-rl-step"),
    ],
)
def test_arguments_that_would_break_the_global_batches_are_refused(changes, message):
    check_arguments(arguments())
    with pytest.raises(ConfigError, match=message):
        check_arguments(arguments(**changes))


def test_settings_come_from_yaml_and_pairs_and_a_critic_is_refused(path):
    args = parsed(path, "configs/loss/dapo.yaml", "lora.rank=2")
    config = read_config(args)
    assert config.loss.settings["clip_ratio_high"] == 0.28 and config.lora.rank == 2
    assert (config.rollouts.path, config.run.seed) == (str(path), 5)
    args.mrl_config = ["advantage.estimator=gae"]
    with pytest.raises(ConfigError, match="gae needs a critic"):
        read_config(args)
    args.mrl_config = ["loss.entropy_target=2.0"]
    with pytest.raises(ConfigError, match="loss.entropy_target: pretrain"):
        read_config(args)


def test_metrics_are_written_for_plot(tmp_path):
    args = SimpleNamespace(mrl_run_dir=str(tmp_path / "run"))
    write_metrics(args, 1, {"loss": -2.0})
    write_metrics(args, 2, {"loss": -3.0})
    assert [row["loss"] for row in read_metrics(tmp_path / "run")] == [-2.0, -3.0]
