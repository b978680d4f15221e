"""Backward overwrites the logits only where nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs import row_function
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs

LABELS = torch.tensor([2, 0, 1])
WEIGHTS = torch.tensor([1.0, -2.0, 0.5])


@pytest.fixture
def overwrites(monkeypatch) -> list[bool]:
    """Records for each backward whether it overwrote its logits."""
    seen: list[bool] = []
    write = row_function.write_gradients

    def spy(z: Tensor, out: Tensor, *args) -> None:
        seen.append(z.data_ptr() == out.data_ptr())
        write(z, out, *args)

    monkeypatch.setattr(row_function, "write_gradients", spy)
    return seen


def make_head() -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()


def loss_of(logits: Tensor, inplace: bool | None = None) -> Tensor:
    log_probs, entropy = vocab_parallel_log_probs(
        logits, LABELS, with_entropy=True, inplace_backward=inplace
    )
    return (WEIGHTS * log_probs + entropy).sum()


def reference_grad(extra=lambda x: 0.0) -> Tensor:
    leaf = make_head()
    x = torch.log_softmax(leaf * 1.5, -1)
    entropy = -(x.exp() * x).sum(-1)
    log_probs = x.gather(1, LABELS[:, None])[:, 0]
    ((WEIGHTS * log_probs + entropy).sum() + extra(leaf * 1.5)).backward()
    return leaf.grad


def check(leaf: Tensor, extra=lambda x: 0.0) -> None:
    torch.testing.assert_close(leaf.grad, reference_grad(extra), rtol=1e-5, atol=1e-6)


def test_unowned_logits_are_overwritten(overwrites):
    leaf = make_head()
    loss_of(leaf * 1.5).backward()
    assert overwrites == [True]
    check(leaf)


def test_unowned_transposed_view_is_overwritten(overwrites):
    leaf = make_head()
    loss_of((leaf * 1.5).view(3, 1, 5).transpose(0, 1)[0]).backward()
    assert overwrites == [True]
    check(leaf)


def test_logits_the_caller_still_holds_keep_their_values(overwrites):
    leaf = make_head()
    logits = leaf * 1.5
    before = logits.detach().clone()
    loss_of(logits).backward()
    assert overwrites == [False] and torch.equal(logits, before)
    check(leaf)


@pytest.mark.parametrize(
    "alias", [lambda x: x.detach(), lambda x: x[:1], lambda x: x.detach().numpy()]
)
def test_logits_held_through_an_alias_keep_their_values(overwrites, alias):
    leaf = make_head()
    logits = leaf * 1.5
    held, before = alias(logits), (leaf * 1.5).detach()
    loss = loss_of(logits)
    del logits
    loss.backward()
    assert overwrites == [False]
    assert torch.equal(torch.as_tensor(held), before[: len(held)])
    check(leaf)


def test_view_of_logits_the_caller_holds_is_not_overwritten(overwrites):
    leaf = make_head()
    logits = leaf * 1.5
    loss_of(logits.view(3, 5)).backward()
    assert overwrites == [False]
    assert torch.equal(logits, leaf * 1.5)


def test_leaf_logits_are_not_overwritten(overwrites):
    leaf = (make_head() * 1.5).detach().requires_grad_()
    before = leaf.detach().clone()
    loss_of(leaf).backward()
    loss_of(leaf.view(3, 5)).backward()
    assert overwrites == [False, False] and torch.equal(leaf, before)


@pytest.mark.parametrize("ours_first", [True, False])
def test_another_operation_that_saved_the_logits_sees_them_whole(overwrites, ours_first):
    leaf = make_head()
    logits = leaf * 1.5
    terms = (loss_of(logits), logits.pow(3).sum())
    del logits
    (terms[0] + terms[1] if ours_first else terms[1] + terms[0]).backward()
    check(leaf, lambda x: x.pow(3).sum())


def test_two_calls_on_the_same_logits_are_both_right(overwrites):
    leaf = make_head()
    logits = leaf * 1.5
    total = loss_of(logits) + loss_of(logits)
    del logits
    total.backward()
    assert overwrites == [False, True]
    torch.testing.assert_close(leaf.grad, 2 * reference_grad(), rtol=1e-5, atol=1e-6)


def test_producer_that_needs_its_output_is_respected(overwrites):
    leaf = make_head()
    loss_of((leaf * 1.5).exp()).backward()
    assert overwrites == [False]


def test_retained_graph_can_be_run_again(overwrites):
    leaf = make_head()
    loss = loss_of(leaf * 1.5)
    loss.backward(retain_graph=True)
    check(leaf)
    leaf.grad = None
    loss.backward()
    assert overwrites == [False, True]
    check(leaf)


def test_retained_grad_of_the_logits_is_right():
    leaf = make_head()
    logits = leaf * 1.5
    logits.retain_grad()
    loss_of(logits).backward()
    assert torch.equal(logits, leaf * 1.5)
    torch.testing.assert_close(logits.grad * 1.5, reference_grad(), rtol=1e-5, atol=1e-6)


def test_checkpointed_region_is_right():
    leaf = make_head()
    torch.utils.checkpoint.checkpoint(
        lambda w: loss_of(w * 1.5), leaf, use_reentrant=False
    ).backward()
    check(leaf)


def test_asked_for_it_overwrites_and_a_second_backward_says_so():
    leaf = make_head()
    logits = leaf * 1.5
    loss = loss_of(logits, inplace=True)
    loss.backward(retain_graph=True)
    check(leaf)
    assert not torch.equal(logits, leaf * 1.5)
    with pytest.raises(InputError, match="backward ran twice"):
        loss.backward()


def test_asked_for_it_with_another_saver_is_an_error_and_no_silent_damage():
    leaf = make_head()
    logits = leaf * 1.5
    other = logits.pow(3).sum()
    total = other + loss_of(logits, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(3, 5)])
def test_asked_for_leaf_logits_it_is_refused(view):
    with pytest.raises(InputError, match="would overwrite a leaf tensor"):
        loss_of(view(make_head()), inplace=True)


def test_second_derivative_is_refused():
    leaf = make_head()
    with pytest.raises(InputError, match="no second derivative"):
        torch.autograd.grad(loss_of(leaf * 1.5), leaf, create_graph=True)


@pytest.mark.parametrize("inplace", [None, False])
def test_forward_never_changes_fp32_logits(inplace):
    logits = make_head().detach()
    before = logits.clone()
    loss_of(logits, inplace)
    assert torch.equal(logits, before)
