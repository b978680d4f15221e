"""Vocabulary-parallel log-probs on gloo ranks: values, gradients, collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl_loss.logprobs import rows_eager
from megatron_rl_loss.logprobs.vocab_parallel import (
    vocab_parallel_log_probs,
    vocab_parallel_outputs,
)
from tests.reference import log_probs as reference
from tests.spawn import run_ranks


def full_case(vocab: int, vocab_size: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(2, 3, vocab, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, vocab_size, (2, 3), generator=generator)
    g, h = torch.randn(2, 2, 3, generator=generator)
    return logits, labels, g, h


class CountCollectives:
    """Counts every all_reduce, and fails on any other collective's name in use here."""

    def __enter__(self):
        self.calls, self._real = [], dist.all_reduce

        def counted(x, op=dist.ReduceOp.SUM, **kwargs):
            self.calls.append((str(op).rsplit(".", 1)[-1], tuple(x.shape)))
            return self._real(x, op=op, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *_):
        dist.all_reduce = self._real


def run_shard(vocab, vocab_size, dtype, temperature, chunk, with_entropy, inplace):
    rows_eager.CPU_CHUNK_ELEMENTS = chunk
    logits, labels, g, h = full_case(vocab, vocab_size, dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    leaf = logits.chunk(size, -1)[rank].contiguous().requires_grad_()
    with CountCollectives() as forward:
        log_probs, entropy = vocab_parallel_log_probs(
            leaf * 1, labels, tp_group=dist.group.WORLD, temperature=temperature,
            with_entropy=with_entropy, vocab_size=vocab_size, inplace_backward=inplace,
        )  # fmt: skip
    total = (g * log_probs).sum() + ((h * entropy).sum() if with_entropy else 0)
    with CountCollectives() as backward:
        total.backward()
    entropy = entropy.detach() if with_entropy else None
    return log_probs.detach(), entropy, leaf.grad, forward.calls, backward.calls


@pytest.mark.parametrize("vocab, vocab_size", [(12, 12), (12, 9), (12, 6), (12, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_shards_equal_the_float64_reference(vocab, vocab_size, dtype):
    results = run_ranks(run_shard, 2, vocab, vocab_size, dtype, 0.7, 1 << 21, True, None)
    logits, labels, g, h = full_case(vocab, vocab_size, dtype)
    want = reference.log_probs_and_entropy(logits, labels, 0.7, vocab_size)
    for log_probs, entropy, *_ in results:
        assert (log_probs - want[0]).abs().max() < 1e-5
        assert (entropy - want[1]).abs().max() < 1e-5
    grad = torch.cat([r[2] for r in results], -1)
    ref = reference.gradient(logits, labels, g, h, 0.7, vocab_size)
    assert ((grad - ref).abs() <= torch.finfo(dtype).eps * ref.abs() + 2e-6).all()
    assert not grad[..., vocab_size:].any()


@pytest.mark.parametrize("chunk", [1, 12, 1 << 21])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_exactly_two_all_reduces_whatever_the_chunks(chunk, with_entropy):
    for result in run_ranks(run_shard, 2, 12, 12, torch.float32, 1.0, chunk, with_entropy, None):
        assert result[3] == [("MAX", (6,)), ("SUM", (3 if with_entropy else 2, 6))]
        assert result[4] == []


def worked_example():
    logits = torch.tensor([1.0, 2, 3, 4]).log().chunk(2)[dist.get_rank()].clone().requires_grad_()
    before = logits.detach().clone()
    log_probs, entropy = vocab_parallel_log_probs(
        logits, torch.tensor(0), tp_group=dist.group.WORLD, with_entropy=True
    )
    (-log_probs).backward()
    return log_probs.item(), entropy.item(), logits.grad.tolist(), torch.equal(before, logits)


def test_shard_without_the_target_gets_its_gradient():
    (lp0, h0, grad0, same0), (lp1, h1, grad1, same1) = run_ranks(worked_example, 2)
    assert lp0 == lp1 == pytest.approx(-2.302585, abs=1e-6)
    assert h0 == h1 == pytest.approx(1.279854, abs=1e-6)
    assert grad0 + grad1 == pytest.approx([-0.9, 0.2, 0.3, 0.4], abs=1e-6)
    assert same0 and same1


def poisoned_shard(poison):
    logits = torch.zeros(2, 4)
    if dist.get_rank() == 1:
        logits[0, 1] = poison
    leaf = logits.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        leaf, torch.tensor([0, 5]), tp_group=dist.group.WORLD, with_entropy=True
    )
    (log_probs[1] + entropy[1]).backward()
    return log_probs.detach(), leaf.grad


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_on_one_shard_is_seen_on_all_and_stays_in_its_row(poison):
    for log_probs, grad in run_ranks(poisoned_shard, 2, poison):
        assert log_probs[0].isnan() and log_probs[1].isfinite()
        assert not grad[0].any() and grad[1].isfinite().all()


def outputs_of_shard(vocab_size):
    logits, labels, *_ = full_case(12, vocab_size)
    shard = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()
    return vocab_parallel_outputs(
        shard, labels, token_ids=labels[..., None] // 2, top_k=4, with_entropy=True,
        vocab_size=vocab_size, tp_group=dist.group.WORLD,
    )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [12, 7, 4])
def test_two_shards_give_the_whole_vocabularys_top_k_and_argmax(vocab_size):
    logits, labels, *_ = full_case(12, vocab_size)
    want = vocab_parallel_outputs(
        logits, labels, token_ids=labels[..., None] // 2, top_k=4, with_entropy=True,
        vocab_size=vocab_size,
    )  # fmt: skip
    for got in run_ranks(outputs_of_shard, 2, vocab_size):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
