from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.ops.sequences import Sequences
from megatron_rl_loss.parallel.sequence_sums import make_sequences, packed_segment_ids
from tests.unit.loss_cases import SEQUENCE_LEVEL, random_case
from tests.unit.test_losses import objective_step

each_objective = pytest.mark.parametrize("name", SEQUENCE_LEVEL)


def test_sums_and_means_skip_masked_positions():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    values = torch.tensor([[1.0, math.nan, 5.0], [math.inf, 2.0, 3.0]])
    sequences = Sequences(mask)
    assert sequences.sum(values).tolist() == [[6, 6, 6], [0, 0, 0]]
    assert sequences.mean(values).tolist() == [[3, 3, 3], [0, 0, 0]]
    assert sequences.num_tokens().tolist() == [[2, 2, 2], [0, 0, 0]]


def pack(x, lengths):
    return torch.cat([x[i, :n] for i, n in enumerate(lengths)])[None]


@each_objective
def test_packing_changes_neither_loss_nor_gradient(name):
    objective = Objective(**SEQUENCE_LEVEL[name])
    tensors, mask, weights = random_case(rows=5, length=7)
    lengths = (7, 3, 5, 7, 1)
    for i, n in enumerate(lengths):
        mask[i, n:] = False
    tensors = {k: torch.where(mask, v, 0.0) for k, v in tensors.items()}
    want = objective_step(objective, tensors, mask, weights)
    packed = {k: pack(v, lengths) for k, v in tensors.items()}
    packed_mask = pack(mask, lengths)
    sequences = make_sequences(packed_mask, cu_seqlens=[0, 7, 10, 15, 22, 23])
    got = objective_step(
        objective, packed, packed_mask, pack(weights, lengths), sequences=sequences
    )
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got[1], pack(want[1], lengths), rtol=1e-10, atol=1e-12)


@each_objective
def test_a_change_in_one_packed_sequence_leaves_the_others_bit_identical(name):
    objective = Objective(**SEQUENCE_LEVEL[name])
    tensors, _, _ = random_case(rows=1, length=12, spread=0.1)
    mask = torch.ones(1, 12, dtype=torch.bool)
    sequences = make_sequences(mask, cu_seqlens=[0, 5, 12])
    before = objective_step(objective, tensors, mask, mask.double(), sequences=sequences)[1]
    tensors["log_probs"][0, 5] -= 0.3
    tensors["old_log_probs"][0, 5] += 0.1
    tensors["advantages"][0, 5:] *= 1.5
    after = objective_step(objective, tensors, mask, mask.double(), sequences=sequences)[1]
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


@each_objective
def test_these_objectives_need_to_know_the_sequences(name):
    assert Objective(**SEQUENCE_LEVEL[name]).needs_sequences
    assert not Objective("ppo_clip", off_policy={"is_level": "token"}).needs_sequences


def test_segment_ids_of_a_context_parallel_part():
    assert packed_segment_ids([0, 4, 12], cp_rank=0, cp_size=2).tolist() == [[0, 0, 1, 1, 1, 1]]
    assert packed_segment_ids([0, 4, 12], cp_rank=1, cp_size=2).tolist() == [[0, 0, 1, 1, 1, 1]]
    assert packed_segment_ids([0, 3, 5]).tolist() == [[0, 0, 0, 1, 1]]


def test_wrong_segment_ids_are_refused():
    mask = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(InputError, match="segment_ids must have the shape"):
        Sequences(mask, torch.zeros(4, dtype=torch.long), num_segments=1)
    with pytest.raises(InputError, match="num_segments be >= 1"):
        Sequences(mask, torch.zeros(1, 4, dtype=torch.long))
