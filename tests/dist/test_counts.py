"""Counts are those of the mini-batch, not of a rank."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl_loss import InputError, reduce_metrics, token_weights
from megatron_rl_loss.metrics import masked_max, mean_pair, sum_pair
from megatron_rl_loss.ops.reduction import REDUCTIONS
from megatron_rl_loss.parallel.agreement import raise_together
from tests.spawn import RankError, run_ranks

MASK = torch.tensor([[t < n for t in range(6)] for n in (5, 1, 0, 3, 2)])
GROUPS = torch.tensor([3, 3, 9, 9, 5])


def my_rows():
    """Rank 0 has three rows, rank 1 two."""
    return slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)


def weights_of_rank(reduction):
    rows = my_rows()
    return token_weights(
        MASK[rows],
        reduction,
        group_ids=GROUPS[rows],
        micro_batch_ids=torch.zeros(len(MASK[rows]), dtype=torch.long),
        max_seq_len=8,
        dp_group=dist.group.WORLD,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_on_two_ranks_are_those_of_one(reduction):
    together = torch.cat(run_ranks(weights_of_rank, 2, reduction))
    alone = token_weights(
        MASK,
        reduction,
        group_ids=GROUPS,
        micro_batch_ids=torch.tensor([0, 0, 0, 1, 1]),
        max_seq_len=8,
    )
    assert torch.equal(together, alone)


def gradient_of_c02():
    """Rank 0: five tokens of gradient 1; rank 1: one token of gradient 7. DDP takes the mean."""
    slope, tokens = ((1.0, 5), (7.0, 1))[dist.get_rank()]
    weights = token_weights(
        torch.ones(1, tokens, dtype=torch.bool), "token_mean", dp_group=dist.group.WORLD
    )
    gradient = (slope * weights).sum() * dist.get_world_size()  # num_microbatches 1 * dp_size 2
    dist.all_reduce(gradient)
    return gradient.item() / dist.get_world_size()


def test_ranks_with_unequal_counts_share_one_mean():  # C02
    assert run_ranks(gradient_of_c02, 2) == pytest.approx([2.0, 2.0])


def metrics_of_rank():
    rank = dist.get_rank()
    mask = torch.ones(10 if rank == 0 else 990, dtype=torch.bool)
    entropy = torch.full(mask.shape, 2.0 if rank == 0 else 0.1)
    ratio = torch.tensor([1.5 if rank == 1 else 0.9])
    return reduce_metrics(
        [
            {
                "loss": sum_pair(torch.tensor(2.0 + 2.0 * rank), 0.5),
                "entropy": mean_pair(entropy, mask),
                "ratio_max": masked_max(ratio, torch.ones(1, dtype=torch.bool)),
            }
        ],
        dp_cp_group=dist.group.WORLD,
    )


def test_metrics_are_equal_on_all_ranks_and_divided_once():  # C27
    first, second = run_ranks(metrics_of_rank, 2)
    assert first == second
    assert first["loss"] == 6.0 and first["ratio_max"] == 1.5
    assert first["entropy"] == pytest.approx(0.119)


def fails_on_one_rank():
    def action():
        if dist.get_rank() == 1:
            raise InputError("row 4 is bad")
        return "fine"

    try:
        return raise_together(action, dist.group.WORLD)
    except InputError as error:
        return str(error)


def test_an_error_on_one_rank_is_raised_on_all():
    assert run_ranks(fails_on_one_rank, 2) == ["rank 1: row 4 is bad", "row 4 is bad"]


def hangs_on_rank_0():
    if dist.get_rank() == 0:
        dist.barrier()


def test_a_hang_ends_in_the_stacks_of_all_ranks():
    with pytest.raises(RankError, match=r"(?s)no answer after 3 s.*rank 0.*hangs_on_rank_0.*rank 1"):
        run_ranks(hangs_on_rank_0, 2, timeout=3)
