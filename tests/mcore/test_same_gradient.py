"""The gradient of a mini-batch, on the real schedule, DDP and optimizer, for every cut."""

from __future__ import annotations

import functools

import pytest

from tests.mcore.harness import Layout, Outcome, assert_close, reference, replace, train_once

BOUND = 1e-5
TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8}
BASE = Layout(settings=TERMS)

REDUCTIONS = [
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "sum",
]
CUTS = {
    "micro-batches of 1": replace(BASE, micro_batch_size=1),
    "micro-batches of 2": replace(BASE, micro_batch_size=2),
    "micro-batches of 4": replace(BASE, micro_batch_size=4),
    "one micro-batch": replace(BASE, micro_batch_size=8),
    "a short last micro-batch": replace(BASE, micro_batch_size=3),
    "DP 2": replace(BASE, dp=2, micro_batch_size=2),
    "TP 2": replace(BASE, tp=2, micro_batch_size=4),
    "TP 2 with sequence parallelism": replace(BASE, tp=2, sequence_parallel=True),
    "PP 2": replace(BASE, pp=2, micro_batch_size=2),
}


@functools.cache
def outcome(key: str) -> Outcome:
    return train_once(CUTS[key])


def check_against_reference(layout: Layout, result: Outcome) -> None:
    metrics, gradients = reference(layout)
    for name, want in metrics.items():
        assert result.metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name
    assert_close(result.gradients, gradients, BOUND)


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_and_metrics_equal_the_reference_for_any_cut(cut):
    check_against_reference(CUTS[cut], outcome(cut))


@pytest.mark.parametrize("cut", CUTS)
def test_parameters_after_one_step_are_the_same_for_any_cut(cut):
    assert_close(outcome(cut).parameters, outcome("one micro-batch").parameters, BOUND)
    assert set(outcome(cut).metrics) == set(outcome("one micro-batch").metrics)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "cut", ["micro-batches of 1", "micro-batches of 4", "DP 2", "TP 2", "PP 2"]
)
def test_every_reduction_equals_the_reference(reduction, cut):
    layout = replace(CUTS[cut], reduction=reduction)
    check_against_reference(layout, train_once(layout))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_pre_normalised_advantages_give_the_gradient_of_weights(reduction):
    layout = replace(BASE, reduction=reduction, pre_normalised=True, settings={}, dp=2)
    check_against_reference(layout, train_once(layout))


@pytest.mark.parametrize("layout", [replace(BASE, tied=True, pp=2), replace(BASE, tied=True, tp=2)])
def test_tied_embeddings_get_both_gradients(layout):
    check_against_reference(layout, train_once(layout))


@pytest.mark.parametrize("cut", ["micro-batches of 2", "DP 2", "PP 2"])
def test_a_fully_masked_mini_batch_gives_exact_zeros(cut):
    result = train_once(replace(CUTS[cut], mask_all=True))
    assert all(float(g.abs().max()) == 0.0 for g in result.gradients.values())
    assert result.metrics["loss"] == 0.0 and result.metrics["grad_norm"] == 0.0
    assert set(result.metrics) == set(outcome("one micro-batch").metrics)
