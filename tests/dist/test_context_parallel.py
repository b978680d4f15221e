"""Gathering a sequence over context-parallel ranks, on gloo, also on a sub-group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl_loss.parallel.context_parallel import (
    gather_sequence,
    gather_sequence_summing,
    zigzag_split,
)
from tests.spawn import run_ranks


def whole_row() -> torch.Tensor:
    return torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same_loss_everywhere(cu_seqlens) -> tuple:
    """Each rank makes the same loss of the whole rows; returns its slice's gradient."""
    group = dist.group.WORLD
    x = zigzag_split(whole_row(), group.rank(), group.size(), cu_seqlens=cu_seqlens)
    x.requires_grad_()
    whole = gather_sequence(x, group, cu_seqlens=cu_seqlens)
    whole.sum(1).pow(3).sum().backward()
    return whole.detach(), x.grad


def test_a_whole_sequence_loss_routes_back_only_the_local_slice():
    for cu_seqlens in (None, (0, 4, 8)):
        x = whole_row().requires_grad_()
        x.sum(1).pow(3).sum().backward()
        for rank, (whole, gradient) in enumerate(run_ranks(same_loss_everywhere, 2, cu_seqlens)):
            assert torch.equal(whole, x.detach())
            expected = zigzag_split(x.grad, rank, 2, cu_seqlens=cu_seqlens)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def own_token_loss(dtype) -> torch.Tensor:
    """Each rank's loss depends on all tokens, weighted by rank + 1; returns its gradient."""
    group = dist.group.WORLD
    x = zigzag_split(whole_row().to(dtype), group.rank(), group.size()).requires_grad_()
    whole = gather_sequence_summing(x, group)
    (whole * (group.rank() + 1)).sum().backward()
    return x.grad


def test_gradients_of_all_ranks_losses_are_summed_for_keys_and_values():
    for dtype in (torch.float64, torch.bfloat16):
        for gradient in run_ranks(own_token_loss, 2, dtype):
            assert gradient.dtype is dtype and torch.equal(gradient, torch.full_like(gradient, 3))


def on_a_sub_group() -> torch.Tensor | None:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = groups[dist.get_rank() % 2]
    x = torch.full((1, 4), float(dist.get_rank()), requires_grad=True)
    whole = gather_sequence_summing(x, group)
    (whole * torch.arange(8.0)).sum().backward()
    return whole.detach(), x.grad


def test_the_gather_works_on_sub_groups():
    results = run_ranks(on_a_sub_group, 4)
    for rank, (whole, gradient) in enumerate(results):
        low, high = rank % 2, rank % 2 + 2
        assert whole.tolist() == [[low, low, high, high, high, high, low, low]]
        positions = [0, 1, 6, 7] if rank < 2 else [2, 3, 4, 5]
        assert gradient.tolist() == [[2.0 * p for p in positions]]
