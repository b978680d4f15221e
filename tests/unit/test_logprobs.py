from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.logprobs import rows_eager
from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_log_probs
from tests.reference import log_probs as reference

T, F = True, False


def random_case(shape=(3, 4), vocab=13, dtype=torch.float32, seed=0, vocab_size=None):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, vocab, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, vocab_size or vocab, shape, generator=generator)
    g, h = torch.randn(2, *shape, generator=generator)
    return logits, labels, g, h


def run(logits, labels, g, h, **kwargs):
    """Values and the gradient of sum(g * log_probs + h * entropy), through a fresh non-leaf."""
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        leaf * 1, labels, with_entropy=h is not None, **kwargs
    )
    total = (g * log_probs).sum() + (0 if h is None else (h * entropy).sum())
    total.backward()
    return log_probs.detach(), entropy if entropy is None else entropy.detach(), leaf.grad


def test_worked_example_of_four_logits():
    logits = torch.tensor([1.0, 2, 3, 4]).log().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor(0), with_entropy=True)
    assert log_probs.item() == pytest.approx(-2.302585, abs=1e-6)
    assert entropy.item() == pytest.approx(1.279854, abs=1e-6)
    (-log_probs).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([-0.9, 0.2, 0.3, 0.4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_equals_float64_reference(dtype, temperature):
    logits, labels, g, h = random_case(dtype=dtype)
    log_probs, entropy, grad = run(logits, labels, g, h, temperature=temperature)
    ref_log_probs, ref_entropy = reference.log_probs_and_entropy(logits, labels, temperature)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs - ref_log_probs).abs().max() < 1e-5
    assert (entropy - ref_entropy).abs().max() < 1e-5
    ref_grad = reference.gradient(logits, labels, g, h, temperature)
    assert grad.dtype == dtype
    assert ((grad - ref_grad).abs() <= torch.finfo(dtype).eps * ref_grad.abs() + 2e-6).all()


def test_bf16_logits_of_a_152k_vocabulary_are_accurate_to_1e_4():
    logits, labels, *_ = random_case((2,), 151_936, torch.bfloat16)
    log_probs, entropy = vocab_parallel_log_probs(logits, labels, with_entropy=True)
    ref_log_probs, ref_entropy = reference.log_probs_and_entropy(logits, labels)
    assert (log_probs - ref_log_probs).abs().max() < 1e-4
    assert (entropy - ref_entropy).abs().max() < 1e-4


def test_large_fp32_logits_keep_their_accuracy():
    logits, labels, g, h = random_case()
    logits = logits + 1e5
    log_probs, _, grad = run(logits, labels, g, h)
    ref_log_probs, _ = reference.log_probs_and_entropy(logits, labels)
    assert (log_probs - ref_log_probs).abs().max() < 1e-5
    assert (grad - reference.gradient(logits, labels, g, h)).abs().max() < 1e-5


@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradcheck(with_entropy):
    logits, labels, *_ = random_case((2, 3), 7, torch.float64, vocab_size=5)

    def f(x):
        results = vocab_parallel_log_probs(
            x, labels, with_entropy=with_entropy, temperature=0.7, vocab_size=5
        )
        return results if with_entropy else results[0]

    assert torch.autograd.gradcheck(f, (logits.requires_grad_(),))


def test_entropy_alone_has_the_right_gradient():
    logits, labels, _, h = random_case()
    leaf = logits.clone().requires_grad_()
    _, entropy = vocab_parallel_log_probs(leaf, labels, with_entropy=True)
    (h * entropy).sum().backward()
    ref = reference.gradient(logits, labels, torch.zeros_like(h), h)
    assert (leaf.grad - ref).abs().max() < 1e-6


def test_padding_columns_count_nowhere_and_get_gradient_0():
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(
        logits, torch.tensor([1]), with_entropy=True, vocab_size=2
    )
    assert log_probs.item() == pytest.approx(-math.log(2), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    (log_probs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0, 0.0]]))


@pytest.mark.parametrize("padding", [math.inf, -math.inf, math.nan, 1e30])
def test_padding_columns_may_hold_anything(padding):
    logits, labels, g, h = random_case(vocab=8, vocab_size=5)
    want = run(logits[..., :5], labels, g, h)
    padded = logits.clone()
    padded[..., 5:] = padding
    got = run(padded, labels, g, h, vocab_size=5)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(got[2][..., :5], want[2]) and not got[2][..., 5:].any()


def test_minus_inf_columns_add_nothing():
    logits = torch.tensor([[1.0, 1.0, -math.inf, -math.inf]], requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor([0]), with_entropy=True)
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    (log_probs + 3 * entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0, 0.0]]))


def test_temperature_divides_the_logits_once():
    logits = torch.tensor([[0.0, math.log(4)]] * 2)
    log_probs, entropy = vocab_parallel_log_probs(
        logits, torch.tensor([0, 1]), temperature=0.5, with_entropy=True
    )
    torch.testing.assert_close(log_probs, torch.tensor([-2.833213, -0.060625]))
    torch.testing.assert_close(entropy, torch.full((2,), 0.223718))


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_bad_temperature_is_refused(temperature):
    with pytest.raises(InputError, match="temperature must be a finite number > 0"):
        vocab_parallel_log_probs(torch.zeros(1, 2), torch.zeros(1).long(), temperature=temperature)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_rows_change_no_bit(poison):
    logits, labels, g, h = random_case((3, 4))
    mask = torch.tensor([[T, F, T, T], [F, F, F, F], [T, T, T, F]])
    clean = run(logits, labels, g, h, loss_mask=mask)
    dirty_logits, dirty_labels = logits.clone(), labels.clone()
    dirty_logits[~mask] = poison
    dirty_labels[~mask] = -100
    dirty = run(dirty_logits, dirty_labels, g, h, loss_mask=mask)
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got, want)
        assert not got[~mask].any()


@pytest.mark.parametrize("with_entropy", [True, False])
def test_rows_without_upstream_gradient_get_exactly_0_even_with_nan(with_entropy):
    logits, labels, *_ = random_case((2, 3))
    logits[1], labels[1, 0] = math.nan, 10**9
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(leaf * 1, labels, with_entropy=with_entropy)
    loss = log_probs[0].sum() + (entropy[0].sum() if with_entropy else 0)
    loss.backward()
    assert leaf.grad[0].isfinite().all() and not leaf.grad[1].any()


def test_label_outside_vocabulary_without_mask_is_nan_and_its_gradient_too():
    leaf = torch.zeros(2, 3, requires_grad=True)
    log_probs, _ = vocab_parallel_log_probs(leaf, torch.tensor([3, 0]))
    assert log_probs[0].isnan() and log_probs[1].isfinite()
    log_probs.sum().backward()
    assert leaf.grad[0].isnan().any() and leaf.grad[1].isfinite().all()


@pytest.mark.parametrize("bad", [-1, 5, 7, 10**6])
def test_bad_label_at_trained_position_is_named(bad):
    logits, labels, *_ = random_case((2, 3), 8, vocab_size=5)
    labels[1, 2] = bad
    with pytest.raises(InputError, match=rf"label {bad} at trained position \[1, 2\].*0\.\.4"):
        vocab_parallel_log_probs(logits, labels, vocab_size=5, loss_mask=torch.ones(2, 3).bool())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_debug_names_the_position_of_non_finite_logits(poison):
    logits, labels, *_ = random_case((2, 3))
    logits[1, 0, 4] = poison
    mask = torch.ones(2, 3).bool()
    with pytest.raises(InputError, match=r"log-prob .* at trained position \[1, 0\] is not finite"):
        vocab_parallel_log_probs(logits, labels, loss_mask=mask, debug=True)
    mask[1, 0] = False
    vocab_parallel_log_probs(logits, labels, loss_mask=mask, debug=True)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"labels": torch.zeros(3).long()}, "labels must have shape"),
        ({"labels": torch.zeros(2)}, "labels must be integer"),
        ({"loss_mask": torch.ones(3)}, "loss_mask must have shape"),
        ({"vocab_size": 5}, "vocab_size is 5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"logits": torch.zeros(2, 4).long()}, "logits must be floating point"),
    ],
)
def test_bad_input_is_refused(kwargs, message):
    arguments = {"logits": torch.zeros(2, 4), "labels": torch.zeros(2).long(), **kwargs}
    with pytest.raises(InputError, match=message):
        vocab_parallel_log_probs(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.parametrize("chunk", [1, 26, 39, 10**6])
def test_results_do_not_depend_on_the_chunk_size(monkeypatch, chunk):
    logits, labels, g, h = random_case((7,))
    want = run(logits, labels, g, h)
    monkeypatch.setattr(rows_eager, "CPU_CHUNK_ELEMENTS", chunk)
    for got, ref in zip(run(logits, labels, g, h), want, strict=True):
        assert torch.equal(got, ref)


def permuted(x):
    return x.permute(1, 0, 2)


def sliced(x):
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def column_major(x):
    return x.transpose(-1, 0).contiguous().transpose(-1, 0)


@pytest.mark.parametrize("layout", [permuted, sliced, column_major])
@pytest.mark.parametrize("inplace", [None, True, False])
def test_any_memory_layout_gives_the_same(layout, inplace):
    logits, labels, g, h = random_case((3, 4))
    leaf = logits.clone().requires_grad_()
    labels, g, h = (layout(x[..., None])[..., 0] for x in (labels, g, h))
    log_probs, entropy = vocab_parallel_log_probs(
        layout(leaf * 1), labels, with_entropy=True, inplace_backward=inplace
    )
    (g * log_probs + h * entropy).sum().backward()
    want = run(logits, *random_case((3, 4))[1:])
    back = layout(torch.arange(12).view(3, 4, 1))[..., 0].flatten()
    assert torch.equal(log_probs.detach().flatten(), want[0].flatten()[back])
    torch.testing.assert_close(leaf.grad, want[2])


def test_no_position_at_all_gives_empty_results():
    leaf = torch.zeros(0, 5, requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(
        leaf * 1, torch.zeros(0).long(), with_entropy=True
    )
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert leaf.grad.shape == (0, 5)
