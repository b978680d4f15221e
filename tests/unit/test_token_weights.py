import pytest
import torch

from megatron_rl_loss import masked_sum, normalize_advantages, token_weights
from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.policy import ppo_clip
from megatron_rl_loss.ops.reduction import REDUCTIONS

# the contract's worked example: lengths 2, 1, 4; A = +1, -1, +0.5; on-policy; max_seq_len 8
LENGTHS = (2, 1, 4)
MASK = torch.tensor([[t < n for t in range(5)] for n in LENGTHS])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5])
WORKED = {
    "token_mean": (-0.428571, (-0.142857, 0.142857, -0.071429)),
    "sequence_mean": (-0.166667, (-0.166667, 0.333333, -0.041667)),
    "seq_mean_token_sum_norm": (-0.125, (-0.041667, 0.041667, -0.020833)),
    "sum": (-3.0, (-1.0, 1.0, -0.5)),
}


def on_policy_gradient(advantages, weights):
    log_probs = torch.full(MASK.shape, -1.0, requires_grad=True)
    loss = masked_sum(ppo_clip(log_probs, log_probs.detach(), advantages).loss, weights)
    loss.backward()
    return loss.item(), log_probs.grad


@pytest.mark.parametrize("reduction", WORKED)
def test_worked_example_with_raw_advantages_and_weights(reduction):
    loss, gradient = on_policy_gradient(
        ADVANTAGES[:, None].expand_as(MASK), token_weights(MASK, reduction, max_seq_len=8)
    )
    want_loss, want_rows = WORKED[reduction]
    assert loss == pytest.approx(want_loss, abs=1e-6)
    for row, want in enumerate(want_rows):
        assert gradient[row, : LENGTHS[row]].tolist() == pytest.approx(
            [want] * LENGTHS[row], abs=1e-6
        )
        assert gradient[row, LENGTHS[row] :].abs().sum() == 0


@pytest.mark.parametrize("reduction", WORKED)
def test_worked_example_with_pre_normalised_advantages(reduction):
    advantages = normalize_advantages(ADVANTAGES, MASK, reduction, max_seq_len=8)
    loss, gradient = on_policy_gradient(advantages, MASK.float())
    want_loss, want_rows = WORKED[reduction]
    assert loss == pytest.approx(want_loss, abs=1e-6)
    assert gradient[:, 0].tolist() == pytest.approx(list(want_rows), abs=1e-6)


def test_token_mean_is_the_mean_over_all_tokens_however_they_are_split():  # C01
    losses = torch.cat([torch.full((100,), 0.5), torch.full((900,), 0.3)]).reshape(10, 100)
    weights = token_weights(torch.ones(10, 100, dtype=torch.bool), "token_mean")
    assert weights.unique().tolist() == pytest.approx([1 / 1000])
    for size in (1, 3, 10):
        parts = zip(losses.split(size), weights.split(size))
        assert sum(masked_sum(part, w) for part, w in parts).item() == pytest.approx(0.32)


def test_legacy_weights_follow_the_micro_batches():
    weights = token_weights(MASK, "token_mean_legacy", micro_batch_ids=torch.tensor([0, 0, 1]))
    assert weights[0, 0].item() == pytest.approx(1 / (2 * 3))
    assert weights[2, 0].item() == pytest.approx(1 / (2 * 4))


def test_prompt_mean_gives_each_prompt_the_same_share():
    weights = token_weights(MASK, "prompt_mean", group_ids=torch.tensor([7, 7, 1 << 40]))
    assert weights[0, 0].item() == pytest.approx(1 / (2 * 3))
    assert weights[1, 0].item() == pytest.approx(1 / (2 * 3))
    assert weights[2, 0].item() == pytest.approx(1 / (2 * 4))


def test_empty_sequences_count_unless_asked_otherwise():
    mask = torch.tensor([[True, True], [False, False]])
    assert token_weights(mask, "sequence_mean")[0, 0].item() == pytest.approx(1 / 4)
    weights = token_weights(mask, "sequence_mean", count_empty_sequences=False)
    assert weights[0, 0].item() == pytest.approx(1 / 2)
    groups = dict(group_ids=torch.tensor([0, 1]))
    assert token_weights(mask, "prompt_mean", **groups)[0, 0].item() == pytest.approx(1 / 4)
    weights = token_weights(mask, "prompt_mean", count_empty_sequences=False, **groups)
    assert weights[0, 0].item() == pytest.approx(1 / 2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mini_batch_without_trained_tokens_has_zero_weights(reduction):  # C09
    ids = torch.zeros(2, dtype=torch.long)
    weights = token_weights(
        torch.zeros(2, 3, dtype=torch.bool),
        reduction,
        group_ids=ids,
        micro_batch_ids=ids,
        max_seq_len=8,
        count_empty_sequences=False,
    )
    assert weights.dtype == torch.float32 and weights.abs().sum() == 0


def test_masked_sum_keeps_soft_and_negative_weights():  # C11
    assert masked_sum(torch.tensor([0.148721]), torch.tensor([0.5])).item() == pytest.approx(
        0.074361, abs=1e-6
    )
    assert masked_sum(torch.tensor([2.0]), torch.tensor([-0.5])).item() == -1.0


def test_masked_sum_ignores_anything_at_weight_zero():
    loss = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    total = masked_sum(loss, torch.tensor([2.0, 0.0, 0.0]))
    total.backward()
    assert total.item() == 2.0 and loss.grad.tolist() == [2.0, 0.0, 0.0]


def test_normalize_advantages_ignores_anything_at_masked_positions():  # C10
    advantages = torch.where(MASK, 1.0, float("nan"))
    clean = normalize_advantages(torch.ones(MASK.shape), MASK, "token_mean")
    assert torch.equal(normalize_advantages(advantages, MASK, "token_mean"), clean)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: token_weights(MASK, "token_meen"), ConfigError, "token_mean_legacy"),
        (lambda: token_weights(MASK, "seq_mean_token_sum_norm"), ConfigError, "max_seq_len"),
        (lambda: token_weights(MASK, "prompt_mean"), InputError, "group_ids"),
        (lambda: token_weights(MASK, "token_mean_legacy"), InputError, "micro_batch_ids"),
        (
            lambda: token_weights(MASK, "prompt_mean", group_ids=torch.zeros(2).long()),
            InputError,
            r"\(2,\)",
        ),
        (
            lambda: token_weights(MASK, "prompt_mean", group_ids=torch.tensor([0.2, 0.7, 1.0])),
            InputError,
            "group_ids must be integers, got torch.float32",
        ),
        (lambda: token_weights(MASK.float(), "sum"), InputError, "bool"),
        (lambda: token_weights(MASK[0], "sum"), InputError, r"\[rows, S\]"),
        (lambda: normalize_advantages(torch.ones(2), MASK, "sum"), InputError, r"\(2,\).*\(3, 5\)"),
        (lambda: masked_sum(torch.ones(2), torch.ones(2, 2)), InputError, "one entry per token"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, error, words):
    with pytest.raises(error, match=words):
        call()
