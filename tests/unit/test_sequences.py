import torch

from megatron_rl_loss.rollouts.rollout import Rollout
from megatron_rl_loss.rollouts.sequences import group_numbers, rollout_metrics, training_sequence


def test_the_first_response_token_is_scored_at_the_last_prompt_position():  # C23
    rollout = Rollout(
        [5, 6, 7], [8, 9], loss_mask=[True, False], rollout_log_probs=[-0.5, -2.0], reward=1.0
    )
    sequence = training_sequence(rollout, 0.25, 3)
    assert sequence["tokens"].tolist() == [5, 6, 7, 8, 9]
    assert sequence["loss_mask"].tolist() == [False, False, True, False, False]
    assert sequence["advantages"].tolist() == [0.0, 0.0, 0.25, 0.25, 0.0]
    assert sequence["rollout_log_probs"].tolist() == [0.0, 0.0, -0.5, -2.0, 0.0]
    assert "ref_log_probs" not in sequence and int(sequence["group_ids"]) == 3


def test_advantages_may_differ_by_token():
    sequence = training_sequence(Rollout([1], [2, 3]), [1.0, -1.0], 0)
    assert sequence["advantages"].tolist() == [1.0, -1.0, 0.0]
    assert sequence["advantages"].dtype == torch.float32


def test_rollouts_without_a_group_are_alone():
    numbers = group_numbers([Rollout([1], [2]), Rollout([1], [2]), Rollout([1], [2], group_id="a")])
    assert len(set(numbers)) == 3 and numbers[0] < 0


def test_metrics_leave_out_what_is_not_there():
    assert rollout_metrics([Rollout([1], [2, 3])]) == {"response_length": 2.0}
