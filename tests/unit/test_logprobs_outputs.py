"""Top-k, given token sets, entropy alone and argmax match from the same pass."""

from __future__ import annotations

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_outputs


def log_softmax_case(vocab=11, real=9):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, vocab, dtype=torch.float64)
    return logits, torch.log_softmax(logits[..., :real] / 0.7, -1)


def outputs(logits, *args, **kwargs):
    return vocab_parallel_outputs(logits, *args, temperature=0.7, vocab_size=9, **kwargs)


def test_token_set_top_k_entropy_and_argmax_equal_log_softmax():
    logits, log_p = log_softmax_case()
    labels = log_p.argmax(-1)
    labels[0, 0] = (labels[0, 0] + 1) % 9
    ids = torch.randint(0, 9, (2, 3, 4))
    got = outputs(logits, labels, token_ids=ids, top_k=5, with_entropy=True)
    top = log_p.topk(5, -1)
    torch.testing.assert_close(got.log_probs, log_p.gather(-1, labels[..., None])[..., 0])
    torch.testing.assert_close(got.token_log_probs, log_p.gather(-1, ids))
    torch.testing.assert_close(got.top_log_probs, top.values)
    torch.testing.assert_close(got.entropy, -(log_p.exp() * log_p).sum(-1))
    assert torch.equal(got.top_ids, top.indices)
    assert got.is_argmax.tolist() == [[False, True, True], [True, True, True]]


@pytest.mark.parametrize("ids", [[[3, 1]], [[2, 2]], [[0, 8]]])
def test_gradcheck_of_token_sets_even_with_an_id_twice(ids):
    logits, _ = log_softmax_case()
    logits = logits[0, :1].clone().requires_grad_()

    def f(x):
        got = outputs(x, torch.tensor([3]), token_ids=torch.tensor(ids), top_k=2, with_entropy=True)
        return got.log_probs, got.entropy, got.token_log_probs, got.top_log_probs

    assert torch.autograd.gradcheck(f, (logits,))


def test_only_what_was_asked_for_is_returned():
    logits, _ = log_softmax_case()
    got = outputs(logits, with_entropy=True)
    assert [name for name, x in got._asdict().items() if x is not None] == ["entropy"]


def test_masked_positions_give_0():
    logits, _ = log_softmax_case()
    mask = torch.tensor([[True, False, True], [False, True, True]])
    logits[~mask] = torch.nan
    labels = torch.zeros(2, 3).long()
    got = outputs(
        logits, labels, token_ids=labels[..., None], top_k=2, with_entropy=True, loss_mask=mask
    )
    for x in got:
        assert not x[~mask].any() and x.isfinite().all()


def test_permuted_logits_give_permuted_outputs():
    logits, _ = log_softmax_case()
    ids = torch.randint(0, 9, (2, 3, 4))
    want = outputs(logits, token_ids=ids, top_k=3)
    got = outputs(logits.transpose(0, 1).contiguous().transpose(0, 1), token_ids=ids, top_k=3)
    for x, y in zip(got, want, strict=True):
        assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize("top_k", [10, -1])
def test_bad_top_k_is_refused(top_k):
    with pytest.raises(InputError, match=r"top_k must be in 1\.\.9"):
        outputs(log_softmax_case()[0], top_k=top_k)


def test_bad_token_ids_are_refused():
    logits, _ = log_softmax_case()
    with pytest.raises(InputError, match="token_ids must be"):
        outputs(logits, token_ids=torch.zeros(2, 3).long())
    with pytest.raises(InputError, match="token_ids must have shape"):
        outputs(logits, token_ids=torch.zeros(3, 2, 1).long())
