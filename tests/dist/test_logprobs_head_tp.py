"""The fused LM head on two vocabulary shards, with and without sequence parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl_loss.logprobs.forward_gradients import linear_loss_sum
from megatron_rl_loss.logprobs.lm_head import linear_log_probs
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs
from tests.spawn import run_ranks


def full_case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 2, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (4, 2), generator=generator)
    g, h = torch.randn(2, 4, 2, generator=generator)
    return hidden, weight, labels, g, h


def run_shard(vocab_size, block_size, sequence_parallel, in_forward):
    hidden, weight, labels, g, h = full_case()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = hidden.chunk(size)[rank] if sequence_parallel else hidden
    mine, shard = mine.clone().requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()
    kwargs = dict(
        tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, with_entropy=True,
        vocab_size=vocab_size, temperature=0.7,
    )  # fmt: skip
    if in_forward:
        flat_g, flat_h = g.flatten(), h.flatten()
        loss, log_probs, entropy = linear_loss_sum(
            mine, shard, labels, lambda lp, e, at: flat_g[at] * lp + flat_h[at] * e,
            chunk_size=block_size, **kwargs,
        )  # fmt: skip
    else:
        log_probs, entropy = linear_log_probs(mine, shard, labels, block_size=block_size, **kwargs)
        loss = (g * log_probs + h * entropy).sum()
    loss.backward()
    return log_probs.detach(), entropy.detach(), mine.grad, shard.grad


@pytest.mark.parametrize("vocab_size", [12, 9, 5])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("block_size, in_forward", [(4, False), (12, False), (3, True)])
def test_two_shards_give_the_unsharded_gradients(
    vocab_size, sequence_parallel, block_size, in_forward
):
    hidden, weight, labels, g, h = full_case()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        hidden @ weight.t(), labels, with_entropy=True, vocab_size=vocab_size, temperature=0.7
    )
    (g * log_probs + h * entropy).sum().backward()
    results = run_ranks(run_shard, 2, vocab_size, block_size, sequence_parallel, in_forward)
    for got_log_probs, got_entropy, grad_hidden, _ in results:
        torch.testing.assert_close(got_log_probs, log_probs.detach())
        torch.testing.assert_close(got_entropy, entropy.detach())
        if not sequence_parallel:
            torch.testing.assert_close(grad_hidden, hidden.grad)
    if sequence_parallel:
        torch.testing.assert_close(torch.cat([r[2] for r in results]), hidden.grad)
    torch.testing.assert_close(torch.cat([r[3] for r in results]), weight.grad)
