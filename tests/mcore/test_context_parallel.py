"""Context parallelism on the real model and schedule gives the gradient of one rank."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.mcore.harness import (
    Layout,
    Outcome,
    assert_close,
    build,
    reference,
    replace,
    rows_of,
    train_once,
)
from tests.spawn import run_ranks

BOUND = 1e-5
BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8})
CUTS = {
    "CP 2": replace(BASE, cp=2),
    "CP 2, other micro-batches": replace(BASE, cp=2, micro_batch_size=3),
    "CP 2, DP 2": replace(BASE, cp=2, dp=2),
    "CP 2, TP 2 with sequence parallelism": replace(
        BASE, cp=2, tp=2, sequence_parallel=True, pad_to=16
    ),
    "CP 2, PP 2": replace(BASE, cp=2, pp=2),
    "CP 4": replace(BASE, cp=4, pad_to=16),
}


@functools.cache
def outcome(cut: str) -> Outcome:
    return train_once(CUTS.get(cut, BASE))


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_and_metrics_equal_the_reference_under_context_parallelism(cut):
    metrics, gradients = reference(CUTS[cut])
    for name, want in metrics.items():
        assert outcome(cut).metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name
    assert_close(outcome(cut).gradients, gradients, BOUND)


@pytest.mark.parametrize("cut", CUTS)
def test_metrics_and_parameters_after_one_step_equal_one_rank(cut):
    assert set(outcome(cut).metrics) == set(outcome("one rank").metrics)
    for name, want in outcome("one rank").metrics.items():
        assert outcome(cut).metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name
    assert_close(outcome(cut).parameters, outcome("one rank").parameters, BOUND)


@pytest.mark.parametrize("reduction", ["token_mean_legacy", "sequence_mean", "prompt_mean"])
def test_counts_are_those_of_whole_sequences(reduction):
    layout = replace(BASE, cp=2, reduction=reduction)
    metrics, gradients = reference(layout)
    result = train_once(layout)
    assert result.metrics["loss"] == pytest.approx(metrics["loss"], rel=BOUND)
    assert_close(result.gradients, gradients, BOUND)


def one_trained_token(layout: Layout) -> Outcome:
    """On each rank: trains on rows with a single trained token, the first label of the row."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics
    from tests.mcore import harness

    chunks, _, spec = build(layout)
    try:
        groups = parallel_groups()
        batches = harness.micro_batches(layout, groups.dp.rank())
        for batch in batches:
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
            for name in ("advantages", "old_log_probs", "ref_log_probs"):
                batch[name] = batch[name].nan_to_num()
        batches[0]["loss_mask"][0, 1] = True
        batches = [batch | {"loss_weights": batch["loss_mask"].float()} for batch in batches]
        collected = run_forward_backward(harness.make_step(layout), chunks, batches)
        metrics = share_metrics(collected, groups)
        return Outcome(metrics, harness.export_gradients(chunks, spec), {})
    finally:
        parallel_state.destroy_model_parallel()


def test_a_single_trained_token_on_one_context_parallel_rank_gives_the_same_gradient():
    whole = run_ranks(one_trained_token, 1, BASE)[0]
    split = run_ranks(one_trained_token, 2, replace(BASE, cp=2))
    assert split[0].metrics == split[1].metrics
    assert split[0].metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=BOUND)
    assert whole.metrics["num_tokens"] == split[0].metrics["num_tokens"] == 1
    assert_close(split[0].gradients, whole.gradients, BOUND)


def log_probs_of(layout: Layout) -> list[torch.Tensor]:
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.token_log_probs import token_log_probs
    from tests.mcore import harness

    chunks, _, _ = build(layout)
    try:
        return token_log_probs(chunks, harness.micro_batches(layout, 0), vocab_size=None)
    finally:
        parallel_state.destroy_model_parallel()


def test_log_probs_without_training_come_back_as_whole_rows():
    whole = run_ranks(log_probs_of, 1, BASE)[0]
    for split in run_ranks(log_probs_of, 2, replace(BASE, cp=2)):
        for mine, want in zip(split, whole, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_split_are_refused_with_the_numbers():
    assert max(len(row["tokens"]) for row in rows_of(BASE)) == 12
    with pytest.raises(AssertionError, match=r"length 14 is not a multiple of 4, .*2 \* cp"):
        train_once(replace(BASE, cp=2, pad_to=14))
