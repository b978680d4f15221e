from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl_loss.parallel.whitening import whiten
from tests.spawn import run_ranks


def case():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    mask[4:] = False
    return torch.randn(6, 5, generator=generator), mask


def whiten_part():
    values, mask = case()
    rows = slice(0, 4) if dist.get_rank() == 0 else slice(4, 6)
    return whiten(values[rows], mask[rows], dp_group=dist.group.WORLD)


def whiten_constant():
    mask = torch.ones(2, 2, dtype=torch.bool)
    return whiten(torch.full((2,), 0.1), mask, dp_group=dist.group.WORLD)


def whiten_constant_per_rank():
    mask = torch.ones(2, 2, dtype=torch.bool)
    return whiten(torch.full((2,), float(dist.get_rank())), mask, dp_group=dist.group.WORLD)


def test_whitening_uses_the_tokens_of_all_ranks_and_a_rank_may_have_none():
    got = torch.cat(run_ranks(whiten_part, 2))
    torch.testing.assert_close(got, whiten(*case()))


def test_equal_advantages_on_all_ranks_give_exactly_zero():
    assert not torch.cat(run_ranks(whiten_constant, 2)).any()


def test_advantages_that_differ_only_between_ranks_are_whitened():
    low, high = run_ranks(whiten_constant_per_rank, 2)
    assert (low < 0).all() and torch.equal(low, -high)
