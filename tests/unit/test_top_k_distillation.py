from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_outputs
from megatron_rl_loss.losses.distillation import top_k_forward_kl

VOCAB, K = 11, 4


def case():
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, 3, 5, VOCAB, generator=generator, dtype=torch.float64)
    top = teacher.log_softmax(-1).topk(K)
    return student, teacher, top.values, top.indices


def slow_kl(student, teacher, ids, with_rest):
    """One position, in Python, from logits."""
    total_q, total_p, loss = 0.0, 0.0, 0.0
    log_z = [math.log(sum(math.exp(x) for x in logits)) for logits in (student, teacher)]
    for i in ids:
        log_p, log_q = student[i] - log_z[0], teacher[i] - log_z[1]
        loss += math.exp(log_q) * (log_q - log_p)
        total_q, total_p = total_q + math.exp(log_q), total_p + math.exp(log_p)
    if with_rest:
        loss += (1 - total_q) * math.log((1 - total_q) / (1 - total_p))
    return loss, total_q


@pytest.mark.parametrize("with_rest", [False, True])
def test_value_and_gradient_from_logits_equal_the_whole_softmax(with_rest):
    student, teacher, log_q, ids = case()
    logits = student.clone().requires_grad_()
    outputs = vocab_parallel_outputs(logits, token_ids=ids)
    result = top_k_forward_kl(outputs.token_log_probs, log_q, with_rest=with_rest)
    for at in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        at = tuple(at)
        want = slow_kl(student[at].tolist(), teacher[at].tolist(), ids[at].tolist(), with_rest)
        got = result.loss[at].item(), result.stats["teacher_mass"][at].item()
        assert got == pytest.approx(want, abs=1e-9)
    weights = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (weights * result.loss).sum().backward()

    dense = student.clone().requires_grad_()
    log_p = dense.log_softmax(-1).gather(-1, ids)
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    if with_rest:
        rest_q, rest_p = 1 - log_q.exp().sum(-1), 1 - log_p.exp().sum(-1)
        kl = kl + rest_q * (rest_q / rest_p).log()
    (weights * kl).sum().backward()
    torch.testing.assert_close(logits.grad, dense.grad)


def test_with_the_rest_it_lies_between_zero_and_the_whole_kl():
    student, teacher, log_q, ids = case()
    whole = (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1)
    log_p = student.log_softmax(-1)
    part = top_k_forward_kl(log_p.gather(-1, ids), log_q, with_rest=True).loss
    assert bool((part >= 0).all()) and bool((part <= whole + 1e-12).all())
    all_ids = torch.arange(VOCAB).expand_as(student)
    full = top_k_forward_kl(log_p, teacher.log_softmax(-1).gather(-1, all_ids)).loss
    torch.testing.assert_close(full, whole)


def test_gradcheck():
    student, _, log_q, ids = case()
    log_p = student.log_softmax(-1).gather(-1, ids)
    for with_rest in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, rest=with_rest: top_k_forward_kl(x, log_q, with_rest=rest).loss,
            (log_p.clone().requires_grad_(),),
        )


def test_a_token_that_the_teacher_rules_out_and_a_sure_teacher_stay_finite():
    log_q = torch.tensor([[0.0, -torch.inf]])
    log_p = torch.tensor([[-1e-9, -30.0]], requires_grad=True)
    loss = top_k_forward_kl(log_p, log_q, with_rest=True).loss
    loss.sum().backward()
    assert bool(loss.isfinite().all()) and bool(log_p.grad.isfinite().all())


def test_other_shapes_are_refused():
    with pytest.raises(InputError, match=r"\[3, 4\] and teacher_top_log_probs \[4\]"):
        top_k_forward_kl(torch.zeros(3, 4), torch.zeros(4))
