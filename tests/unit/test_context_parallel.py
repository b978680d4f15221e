"""The zigzag layout of context parallelism and its inverse."""

from __future__ import annotations

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.parallel.context_parallel import (
    gather_sequence,
    pad_sequence_to,
    sequence_multiple,
    zigzag_merge,
    zigzag_positions,
    zigzag_split,
)


def test_eight_tokens_on_two_ranks_are_0167_and_2345():
    tokens = torch.arange(8)[None]
    assert [zigzag_split(tokens, r, 2).tolist() for r in (0, 1)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


def test_packed_sequences_are_each_cut_on_their_own():
    assert zigzag_positions((0, 4, 12), 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag_positions((0, 4, 12), 1, 2).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dim, shape", [(1, (3, 16)), (1, (2, 16, 5)), (0, (16, 2, 3))])
@pytest.mark.parametrize("cu_seqlens", [None, (0, 8, 16)])
def test_merging_the_slices_gives_the_rows_back(cp_size, dim, shape, cu_seqlens):
    x = torch.randn(shape)
    shards = [zigzag_split(x, r, cp_size, dim=dim, cu_seqlens=cu_seqlens) for r in range(cp_size)]
    assert {shard.shape[dim] for shard in shards} == {16 // cp_size}
    assert torch.equal(zigzag_merge(shards, dim=dim, cu_seqlens=cu_seqlens), x)


def test_megatrons_rotary_slice_is_the_same_cut():
    x = torch.arange(16)
    for rank in range(2):  # chunks rank and 2 C - 1 - rank, as in get_pos_emb_on_this_cp_rank
        chunks = x.view(4, 4)[[rank, 3 - rank]].flatten()
        assert torch.equal(zigzag_split(x, rank, 2, dim=0), chunks)


def test_too_short_sequences_are_padded_with_mask_false_and_weight_zero():
    mask, weights = torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 5)
    assert pad_sequence_to(mask, 4).tolist() == [[True] * 5 + [False] * 3]
    assert pad_sequence_to(weights, 4)[0, 5:].tolist() == [0.0] * 3
    assert pad_sequence_to(weights, 5) is weights


def test_lengths_that_do_not_split_are_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"6 tokens does not split over 2 .* multiple of 2 \* 2"):
        zigzag_split(torch.zeros(1, 6), 0, 2)
    with pytest.raises(InputError, match="2 tokens"):
        zigzag_positions((0, 4, 6), 0, 2)


def test_ranks_offsets_and_slices_that_do_not_exist_are_refused():
    x = torch.zeros(1, 8)
    with pytest.raises(InputError, match="cp_rank must be from 0 to cp_size - 1 = 1, got 2"):
        zigzag_split(x, 2, 2)
    with pytest.raises(
        InputError, match=r"from 0 to the row's 8 tokens, in integers, got \[0, 4\]"
    ):
        zigzag_split(x, 0, 2, cu_seqlens=(0, 4))
    for offsets in ((0, 12, 4, 8), (0.0, 8.0), ()):
        with pytest.raises(InputError, match="must rise from 0"):
            zigzag_split(x, 0, 2, cu_seqlens=offsets)
        with pytest.raises(InputError, match="must rise from 0"):
            zigzag_positions(offsets, 0, 2)
    with pytest.raises(InputError, match="multiple must be at least 1, got 0"):
        pad_sequence_to(x, 0)
    with pytest.raises(InputError, match="at least 1, got 0 and 2"):
        sequence_multiple(0, 2)
    with pytest.raises(InputError, match=r"one shape, got: \(1, 4\), \(1, 2\)"):
        zigzag_merge([x[:, :4], x[:, :2]])


def test_offsets_may_be_a_tensor():
    x, offsets = torch.arange(8)[None], torch.tensor([0, 4, 8], dtype=torch.int32)
    assert zigzag_split(x, 0, 2, cu_seqlens=offsets).tolist() == [[0, 3, 4, 7]]


def test_one_rank_keeps_the_tensor():
    x = torch.zeros(1, 3)
    assert gather_sequence(x, None) is x and zigzag_split(x, 0, 1) is x
