from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_outputs
from megatron_rl_loss.losses.contract_check import check_loss
from megatron_rl_loss.losses.distillation import top_k_forward_kl
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.mcore.collate import collate
from megatron_rl_loss.parallel.packing import pack_sequences, pad_sequences
from megatron_rl_loss.parallel.token_batch import make_token_batch
from megatron_rl_loss.types import TokenLoss

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


def test_entries_that_the_teacher_does_not_use_count_nowhere():
    student, _, log_q, ids = case()
    log_p = student.log_softmax(-1)
    few = ids[..., :2]
    want = top_k_forward_kl(log_p.gather(-1, few), log_q[..., :2], with_rest=True)
    for nothing in (-torch.inf, -1000.0):
        filled, padded = log_q.clone(), ids.clone()
        filled[..., 2:], padded[..., 2:] = nothing, 0
        leaf = log_p.gather(-1, padded).requires_grad_()
        got = top_k_forward_kl(leaf, filled, with_rest=True)
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
        got.loss.sum().backward()
        assert not leaf.grad[..., 2:].any() and bool(leaf.grad[..., :2].all())
    missing = log_p.gather(-1, ids).index_fill(-1, torch.tensor(3), torch.nan).requires_grad_()
    filled = log_q.index_fill(-1, torch.tensor(3), -torch.inf)
    top_k_forward_kl(missing, filled, with_rest=True).loss.sum().backward()
    assert bool(missing.grad.isfinite().all())


def micro_batch(**changes):
    """Two rows of 4 tokens, of which [0, 1], [0, 2] and [1, 0] are trained, k = 2."""
    mask = torch.tensor([[False, True, True, False], [True, False, False, False]])
    ids = torch.arange(16).view(2, 4, 2)
    log_probs = torch.tensor([0.5, 0.25]).log().expand(2, 4, 2).clone()
    batch = {"tokens": torch.arange(8).view(2, 4), "loss_mask": mask}
    return batch | {"teacher_top_ids": ids, "teacher_top_log_probs": log_probs} | changes


def checked(**changes):
    needs = Objective("top_k_distillation").needs
    return make_token_batch(micro_batch(**changes), needs=needs, vocab_size=16)


def put(name, at, value):
    changed = micro_batch()[name].clone()
    changed[at] = value
    return {name: changed}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("teacher_top_ids", (0, 2, 1), 16), "teacher_top_ids is 16 at row 0, position 2, entr"),
        (put("teacher_top_ids", (1, 0, 0), -1), "is -1 at row 1, position 0, entry 0"),
        (put("teacher_top_log_probs", (0, 1, 0), torch.nan), "nan at row 0, position 1, entry 0"),
        (put("teacher_top_log_probs", (0, 1, 0), 0.7), "is 0.7 at row 0, position 1, entry 0"),
        (put("teacher_top_log_probs", (0, 1), -0.1), "of 1.81 in all at row 0, position 1"),
        ({"teacher_top_ids": torch.zeros(2, 4, 3).long()}, r"\(2, 4, 3\) and teacher_top_log_prob"),
        ({"teacher_top_ids": torch.zeros(2, 4).long()}, r"\(2, 4\), expected \(2, 4, k\)"),
        ({"teacher_top_ids": torch.zeros(2, 4, 2)}, "teacher_top_ids must be integers"),
        ({"teacher_top_log_probs": torch.zeros(2, 4, 0)}, "k >= 1"),
        ({"teacher_top_ids": None}, "lacks 'teacher_top_ids'"),
    ],
)
def test_a_micro_batch_that_does_not_fit_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        checked(**change)


def test_masked_positions_may_hold_anything_and_unread_fields_are_dropped():
    mask = micro_batch()["loss_mask"].unsqueeze(-1)
    ids = torch.where(mask, micro_batch()["teacher_top_ids"], -(2**63))
    log_probs = torch.where(mask, micro_batch()["teacher_top_log_probs"], torch.inf)
    batch = checked(teacher_top_ids=ids, teacher_top_log_probs=log_probs)
    assert (
        torch.equal(batch.token_ids, ids) and batch.tensors["teacher_top_log_probs"].shape[2] == 2
    )
    unread = make_token_batch(micro_batch(), vocab_size=2**20)
    assert unread.token_ids is None and not unread.tensors


def test_a_context_parallel_rank_gets_its_slice_of_all_entries():
    batch = micro_batch()
    parts = [
        make_token_batch(batch, needs=Objective("top_k_distillation").needs, cp_rank=r, cp_size=2)
        for r in range(2)
    ]
    assert parts[0].token_ids.tolist() == batch["teacher_top_ids"][:, [0, 3]].tolist()
    assert parts[1].token_ids.tolist() == batch["teacher_top_ids"][:, [1, 2]].tolist()


def test_packing_keeps_the_entries_and_refuses_another_k():
    def sequence(length, k):
        ids = torch.arange(length * k).view(length, k)
        mask = torch.arange(length) < length - 1
        return {
            "tokens": torch.arange(length),
            "loss_mask": mask,
            "teacher_top_ids": ids,
            "teacher_top_log_probs": -1.0 - ids,
        }

    pair = [sequence(3, 2), sequence(5, 2)]
    packed, padded = pack_sequences(pair, multiple=4), pad_sequences(pair, multiple=4)
    want = torch.cat([pair[0]["teacher_top_ids"], torch.zeros(1, 2), pair[1]["teacher_top_ids"]])
    assert torch.equal(packed["teacher_top_ids"][0, :9], want.long())
    assert packed["teacher_top_log_probs"].shape == (1, 12, 2)
    assert padded["teacher_top_ids"].shape == (2, 8, 2)
    assert torch.equal(padded["teacher_top_ids"][1, :5], pair[1]["teacher_top_ids"])
    assert collate(pair, (), multiple=4)["teacher_top_ids"].shape == (1, 4, 2)
    with pytest.raises(InputError, match=r"sequence 1: .* \(5, 3\), expected \(5, 2\)"):
        pack_sequences([pair[0], sequence(5, 3)])


@pytest.mark.parametrize("with_rest", [False, True])
def test_the_objective_ignores_masked_entries_to_the_bit(with_rest):
    objective = Objective("top_k_distillation", {"with_rest": with_rest})
    student, _, log_q, ids = case()
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    steps = []
    for garbage in (0.0, torch.nan, torch.inf, -torch.inf):
        clean = student.float().log_softmax(-1).gather(-1, ids)
        leaf = torch.where(mask[..., None], clean, garbage).requires_grad_()
        teacher = torch.where(mask[..., None], log_q.float(), garbage)
        tensors = {"teacher_top_log_probs": teacher}
        weights = torch.where(mask, 0.1, garbage)
        loss, metrics = objective(
            torch.zeros(3, 5), None, tensors, mask, weights, token_log_probs=leaf
        )
        loss.backward()
        steps.append((loss.detach(), leaf.grad, metrics["teacher_mass"]))
    assert steps[0][0] != 0 and not steps[0][1][~mask].any()
    for step in steps[1:]:
        assert all(torch.equal(a, b) for a, b in zip(steps[0], step, strict=True))


def test_a_loss_of_ones_own_may_mix_labels_and_a_token_set():
    def mixed(log_probs, token_log_probs, teacher_top_log_probs, *, coef=0.5):
        kl = top_k_forward_kl(token_log_probs, teacher_top_log_probs)
        return TokenLoss(coef * kl.loss - log_probs, kl.stats)

    assert not check_loss(mixed).homogeneous
    assert Objective(mixed).needs == ("teacher_top_log_probs", "teacher_top_ids")
    report = check_loss("top_k_distillation", with_rest=True)
    assert not report.homogeneous and not report.depends_on_micro_batch
