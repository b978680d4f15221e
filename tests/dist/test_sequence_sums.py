"""Sequence-level losses with each sequence split over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.parallel.context_parallel import zigzag_merge, zigzag_split
from megatron_rl_loss.parallel.sequence_sums import make_sequences
from tests.spawn import run_ranks
from tests.unit.loss_cases import SEQUENCE_LEVEL, random_case
from tests.unit.test_losses import objective_step

OFFSETS = [0, 4, 12, 24]


def whole_case(packed):
    tensors, mask, weights = random_case(*((1, 24) if packed else (5, 8)))
    if packed:
        mask[:] = True
        mask[0, 4:12] = False  # the second sequence has no trained token
        mask[0, 15:18] = False
    else:
        mask[2, :2] = mask[2, 6:] = False  # rank 0 holds no trained token of this sequence
    tensors = {k: torch.where(mask, v - 0.1, 0.0) for k, v in tensors.items()}
    return tensors, mask, torch.where(mask, weights + 0.1, 0.0)


def split_step(name, packed):
    """Loss, gradient and metrics of this rank's part of every sequence."""
    rank, size = dist.get_rank(), dist.get_world_size()
    offsets = OFFSETS if packed else None
    tensors, mask, weights = whole_case(packed)

    def part(x):
        return zigzag_split(x, rank, size, cu_seqlens=offsets)

    sequences = make_sequences(part(mask), cu_seqlens=offsets, cp_group=dist.group.WORLD)
    local = {k: part(v) for k, v in tensors.items()}
    return objective_step(
        Objective(**SEQUENCE_LEVEL[name]), local, part(mask), part(weights), sequences=sequences
    )


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", SEQUENCE_LEVEL)
def test_split_sequences_give_the_loss_and_gradient_of_whole_ones(name, packed):
    tensors, mask, weights = whole_case(packed)
    sequences = make_sequences(mask, cu_seqlens=OFFSETS if packed else None)
    objective = Objective(**SEQUENCE_LEVEL[name])
    want = objective_step(objective, tensors, mask, weights, sequences=sequences)
    parts = run_ranks(split_step, 2, name, packed)
    loss = sum(part[0] for part in parts)
    torch.testing.assert_close(loss, want[0], rtol=1e-5, atol=1e-6)
    gradient = zigzag_merge([part[1] for part in parts], cu_seqlens=OFFSETS if packed else None)
    torch.testing.assert_close(gradient, want[1], rtol=1e-6, atol=1e-8)
    for key, value in want[2].items():
        if value.numel() == 2 and key not in ("loss", "policy_loss", "num_tokens"):
            total = sum(part[2][key] for part in parts)
            torch.testing.assert_close(total, value, rtol=1e-5, atol=1e-5, msg=key)
