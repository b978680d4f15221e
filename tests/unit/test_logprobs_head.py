"""Log-probs from hidden states: the same numbers and gradients as from logits."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs import head_plan, products
from megatron_rl_loss.logprobs.forward_gradients import linear_loss_sum
from megatron_rl_loss.logprobs.lm_head import linear_log_probs
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs

VOCAB, REAL = 29, 27


def head_case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, REAL, (3, 4), generator=generator)
    g, h = torch.randn(2, 3, 4, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, g, h


def from_logits(hidden, weight, labels, g, h):
    log_probs, entropy = vocab_parallel_log_probs(
        hidden @ weight.t(), labels, with_entropy=True, temperature=0.7, vocab_size=REAL
    )
    (g * log_probs + h * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), *grads_of(hidden, weight)


def grads_of(*leaves: Tensor):
    grads = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    return grads


def run_head(hidden, weight, labels, **kwargs):
    return linear_log_probs(
        hidden, weight, labels, with_entropy=True, temperature=0.7, vocab_size=REAL, **kwargs
    )


@pytest.mark.parametrize("block_size", [1, 7, 27, 29, 100])
def test_any_block_size_equals_the_logits_path(block_size):
    hidden, weight, labels, g, h = head_case()
    want = from_logits(hidden, weight, labels, g, h)
    log_probs, entropy = run_head(hidden, weight, labels, block_size=block_size)
    (g * log_probs + h * entropy).sum().backward()
    got = log_probs.detach(), entropy.detach(), *grads_of(hidden, weight)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    assert not got[3][REAL:].any()


@pytest.mark.parametrize("block_size", [8, 29])
def test_bf16_head_equals_the_bf16_logits_path(block_size):
    hidden, weight, labels, g, h = head_case(torch.bfloat16)
    want = from_logits(hidden, weight, labels, g, h)
    log_probs, entropy = run_head(hidden, weight, labels, block_size=block_size)
    assert log_probs.dtype == entropy.dtype == torch.float32
    (g * log_probs + h * entropy).sum().backward()
    torch.testing.assert_close(log_probs, want[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, want[1], rtol=0, atol=1e-5)
    for x, y in zip(grads_of(hidden, weight), want[2:], strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("block_size", [4, 29])
def test_gradcheck(block_size):
    hidden, weight, labels, *_ = head_case()
    f = lambda x, w: run_head(x, w, labels[:1, :2], block_size=block_size)  # noqa: E731
    assert torch.autograd.gradcheck(f, (hidden[:1, :2].detach().requires_grad_(), weight))


@pytest.mark.parametrize("block_size", [8, 29])
def test_second_backward_through_a_retained_graph_gives_the_same(block_size):
    hidden, weight, labels, g, _ = head_case()
    log_probs, _ = run_head(hidden, weight, labels, block_size=block_size)
    loss = (g * log_probs).sum()
    loss.backward(retain_graph=True)
    first = grads_of(hidden, weight)
    loss.backward()
    for x, y in zip(grads_of(hidden, weight), first, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen):
    hidden, weight, labels, g, h = head_case()
    want = from_logits(hidden, weight, labels, g, h)[2:]
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    log_probs, entropy = run_head(hidden, weight, labels, block_size=8)
    (g * log_probs + h * entropy).sum().backward()
    for name, leaf, ref in (("hidden", hidden, want[0]), ("weight", weight, want[1])):
        if name == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, ref)


def test_no_grad_mode_gives_the_same_log_probs():
    hidden, weight, labels, *_ = head_case()
    want, _ = run_head(hidden, weight, labels, block_size=8)
    with torch.no_grad():
        got, _ = run_head(hidden, weight, labels, block_size=8)
    assert torch.equal(got, want) and not got.requires_grad


@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_takes_the_weight_gradient_as_megatron_does(tied):
    hidden, weight, labels, g, h = head_case(torch.bfloat16)
    want = from_logits(hidden, weight, labels, g, h)[3]
    weight.main_grad = torch.ones(VOCAB, 6)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = tied
    log_probs, entropy = run_head(hidden, weight, labels, block_size=8, accumulate_main_grad=True)
    (g * log_probs + h * entropy).sum().backward()
    torch.testing.assert_close(weight.main_grad - 1, want.float(), rtol=2e-2, atol=2e-2)
    assert weight.grad_added_to_main_grad and weight.grad is not None
    assert not tied or not weight.grad.any()


def test_masked_rows_add_nothing():
    hidden, weight, labels, g, h = head_case()
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) < 0.5
    log_probs, entropy = run_head(hidden, weight, labels, block_size=8, loss_mask=mask)
    (g * log_probs + h * entropy).sum().backward()
    assert not log_probs[~mask].any() and not hidden.grad[~mask].any()
    got = grads_of(hidden, weight)
    want = from_logits(hidden, weight, labels, g * mask, h * mask)[2:]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 100])
def test_gradients_in_forward_equal_those_of_backward(chunk_size):
    hidden, weight, labels, g, h = head_case()
    want = from_logits(hidden, weight, labels, 4 * g, 4 * h)
    flat_g, flat_h = g.flatten(), h.flatten()
    result = linear_loss_sum(
        hidden, weight, labels, lambda lp, e, at: flat_g[at] * lp + flat_h[at] * e,
        with_entropy=True, temperature=0.7, vocab_size=REAL, chunk_size=chunk_size,
    )  # fmt: skip
    (4 * result.loss_sum).backward()
    torch.testing.assert_close(result.log_probs, want[0])
    torch.testing.assert_close(result.entropy, want[1])
    torch.testing.assert_close(result.loss_sum.item(), (g * want[0] + h * want[1]).sum().item())
    for x, y in zip(grads_of(hidden, weight), want[2:], strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("chunk_size", [5, 12])
def test_bf16_gradients_in_forward_equal_those_of_backward(chunk_size, monkeypatch):
    monkeypatch.setattr(products, "_ROWS", 8)  # the weight's gradient is summed piece by piece
    hidden, weight, labels, g, h = head_case(torch.bfloat16)
    want = from_logits(hidden, weight, labels, g, h)
    flat_g, flat_h = g.flatten(), h.flatten()
    result = linear_loss_sum(
        hidden, weight, labels, lambda lp, e, at: flat_g[at] * lp + flat_h[at] * e,
        with_entropy=True, temperature=0.7, vocab_size=REAL, chunk_size=chunk_size,
    )  # fmt: skip
    result.loss_sum.backward()
    torch.testing.assert_close(result.log_probs, want[0], rtol=0, atol=1e-5)
    got = grads_of(hidden, weight)
    for x, y in zip(got, want[2:], strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert not got[1][REAL:].any()


def test_the_factor_on_bf16_gradients_in_forward_is_not_rounded_to_bf16():
    hidden, weight, labels, *_ = head_case(torch.bfloat16)
    result = linear_loss_sum(hidden, weight, labels, lambda lp, e, at: lp)
    result.loss_sum.backward(retain_graph=True)
    once = grads_of(hidden, weight)
    (257 * result.loss_sum).backward()
    for x, y in zip(grads_of(hidden, weight), once, strict=True):
        assert torch.equal(x, (257 * y.float()).bfloat16())


def test_loss_that_trains_nothing_gives_gradient_0():
    hidden, weight, labels, *_ = head_case()
    result = linear_loss_sum(hidden, weight, labels, lambda lp, e, at: 0 * lp.detach())
    result.loss_sum.backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_budget_decides_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(head_plan, "MIN_BLOCK", 8)
    head_plan.report_choice.cache_clear()
    hidden, weight, labels, *_ = head_case()
    with caplog.at_level(logging.INFO, logger="megatron_rl_loss"):
        for _ in range(2):
            run_head(hidden, weight, labels)
            run_head(hidden, weight, labels, memory_budget_bytes=10)
    assert ["are kept" in r.message for r in caplog.records] == [True, False]


@pytest.mark.parametrize(
    "budget, block", [(1 << 40, 151_936), (1 << 28, 8192), (1 << 27, 4096), (0, 1024)]
)
def test_block_is_the_largest_that_fits_the_budget(budget, block):
    assert head_plan.choose_block_size(16_384, 151_936, 2, budget) == block


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(3, 4, 5)}, "hidden must be"),
        ({"weight": torch.zeros(VOCAB, 6)}, "hidden is torch.float64, weight is torch.float32"),
        ({"labels": torch.zeros(4, 3).long()}, "labels must have shape"),
        ({"labels": torch.full((3, 4), REAL)}, r"label 27 at trained position \[0, 0\]"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"accumulate_main_grad": True}, "weight has no main_grad"),
        ({"backend": "fast"}, "backend must be one of"),
    ],
)
def test_bad_input_is_refused(change, message):
    hidden, weight, labels, *_ = head_case()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, **change}
    mask = torch.ones(arguments["labels"].shape, dtype=torch.bool)
    with pytest.raises(InputError, match=message):
        run_head(**arguments, loss_mask=mask)


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
def test_16_bit_products_are_right_with_and_without_16_bit_instructions(
    monkeypatch, slow, total_dtype
):
    monkeypatch.setattr(products, "_slow_16_bit", lambda *_: slow)
    monkeypatch.setattr(products, "_ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 7, generator=generator).bfloat16()
    b = torch.randn(7, 3, generator=generator).bfloat16()
    want = a.double() @ b.double()
    out = products.product_into(a, b, torch.empty(5, 3, dtype=torch.bfloat16))
    total = torch.ones(5, 3, dtype=total_dtype)
    products.add_product(total, a, b)
    for got, ref in ((out, want), (total, want + 1)):
        torch.testing.assert_close(got.double(), ref, rtol=2e-2, atol=2e-2)
