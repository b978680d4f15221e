"""Combined layouts, optimizer kinds and bf16 give the gradient and the step of one rank."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from megatron_rl_loss.errors import LayoutError
from tests.mcore.harness import (
    Layout,
    Outcome,
    assert_close,
    reference,
    replace,
    train_once,
)
from tests.spawn import run_ranks

BOUND = 1e-5
BF16_BOUND = 0.04
TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8}
BASE = Layout(settings=TERMS)
DEEP = replace(BASE, layers=4)
CUTS = {
    "PP 2, VPP 2": replace(DEEP, pp=2, vpp=2),
    "PP 2, VPP 2, DP 2": replace(DEEP, pp=2, vpp=2, dp=2),
    "PP 2, VPP 2, TP 2 with sequence parallelism": replace(
        DEEP, pp=2, vpp=2, tp=2, sequence_parallel=True
    ),
    "PP 4": replace(DEEP, pp=4),
    "TP 2, PP 2": replace(BASE, tp=2, pp=2),
    "TP 2, DP 2": replace(BASE, tp=2, dp=2),
    "DP 4": replace(BASE, dp=4),
    "CP 2, TP 2": replace(BASE, cp=2, tp=2),
    "tied, PP 2, DP 2": replace(BASE, tied=True, pp=2, dp=2),
    "tied, PP 2, VPP 2": replace(DEEP, tied=True, pp=2, vpp=2),
    "tied, TP 2, PP 2": replace(BASE, tied=True, tp=2, pp=2),
    "overlap_grad_reduce, DP 2": replace(BASE, dp=2, overlap_grad_reduce=True),
    "overlap_grad_reduce, PP 2, VPP 2, DP 2": replace(
        DEEP, pp=2, vpp=2, dp=2, overlap_grad_reduce=True
    ),
    "average_in_collective, DP 2": replace(BASE, dp=2, average_in_collective=True),
    "average_in_collective, CP 2, DP 2": replace(BASE, cp=2, dp=2, average_in_collective=True),
}
DISTRIBUTED = {
    "DP 2": replace(BASE, dp=2),
    "CP 2, DP 2": replace(BASE, cp=2, dp=2),
    "PP 2, DP 2": replace(BASE, pp=2, dp=2),
    "TP 2, DP 2": replace(BASE, tp=2, dp=2),
    "overlap_grad_reduce, DP 2": replace(BASE, dp=2, overlap_grad_reduce=True),
    "average_in_collective, DP 2": replace(BASE, dp=2, average_in_collective=True),
}
BF16_CUTS = {
    "one rank": replace(BASE, bf16=True),
    "DP 2": replace(BASE, bf16=True, dp=2),
    "TP 2 with sequence parallelism": replace(BASE, bf16=True, tp=2, sequence_parallel=True),
    "PP 2": replace(BASE, bf16=True, pp=2),
    "CP 2": replace(BASE, bf16=True, cp=2),
}


@functools.cache
def one_rank(layers: int, tied: bool) -> Outcome:
    return train_once(replace(BASE, layers=layers, tied=tied))


def check_step(layout: Layout, result: Outcome) -> None:
    whole = one_rank(layout.layers, layout.tied)
    assert_close(result.parameters, whole.parameters, BOUND)
    check_metrics(result, whole.metrics, BOUND)
    assert set(result.metrics) == set(whole.metrics)


def check_metrics(result: Outcome, expected: dict[str, float], bound: float) -> None:
    for name, want in expected.items():
        assert result.metrics[name] == pytest.approx(want, rel=bound, abs=1e-9), name


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_metrics_and_step_equal_one_rank(cut):
    result = train_once(CUTS[cut])
    metrics, gradients = reference(CUTS[cut])
    check_metrics(result, metrics, BOUND)
    assert_close(result.gradients, gradients, BOUND)
    check_step(CUTS[cut], result)


@pytest.mark.parametrize("cut", DISTRIBUTED)
def test_distributed_optimizer_takes_the_step_of_one_rank(cut):
    layout = replace(DISTRIBUTED[cut], distributed_optimizer=True)
    check_step(layout, train_once(layout))


def run_micro_batches(layout: Layout, number: int, **overrides) -> str:
    """On each rank: runs the first `number` rows, and returns the error that stops them, or ""."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.train_step import run_forward_backward
    from tests.mcore import harness

    chunks, _, _ = harness.build(layout, **overrides)
    try:
        batches = harness.micro_batches(replace(layout, micro_batch_size=1), 0)[:number]
        for batch in batches:
            batch["loss_weights"] = batch["loss_mask"].float()
        run_forward_backward(harness.make_step(layout), chunks, batches)
        return ""
    except LayoutError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()


def test_micro_batch_count_that_the_interleaved_schedule_cannot_run_is_refused():
    for message in run_ranks(run_micro_batches, 2, replace(DEEP, pp=2, vpp=2), 5):
        assert re.match(r"5 micro-batches .* multiple of 2\. .*or use 6\.$", message)


def run_batched(layout: Layout) -> str:
    return run_micro_batches(layout, 4, overlap_p2p_comm=False, batch_p2p_comm=True)


def test_batched_transfers_of_two_interleaved_stages_are_refused():
    for message in run_ranks(run_batched, 2, replace(DEEP, pp=2, vpp=2)):
        assert "overlap_p2p_comm=True and batch_p2p_comm=False" in message


def test_micro_batch_count_need_not_be_a_multiple_without_virtual_stages():
    assert run_ranks(run_micro_batches, 2, replace(DEEP, pp=2), 5) == ["", ""]


@pytest.mark.parametrize("cut", BF16_CUTS)
def test_bf16_gradient_equals_float64_within_the_rounding_of_bf16(cut):
    """Against float64 with the same bf16 weights.

    Bound: a rounding to bf16 (8 significant bits) errs by at most u = 2^-8 relative to its value,
    and by u / 2 in root mean square. About 14 roundings lie on the path through a layer (norm, q,
    k, rope, scores, probabilities, context, projection, sum, norm, gate, up, product, down, sum),
    twice over for backward, and as many again meet from the other factor of each weight gradient:
    with 2 layers and the head n = 2 * (2 * 14 + 2) * 2 = 120. Independent errors add as a random
    walk: sqrt(120) * 2^-9 = 0.021; the bound is twice that, 0.04.
    """
    result = train_once(BF16_CUTS[cut])
    metrics, gradients = reference(BF16_CUTS[cut], dtype=torch.bfloat16)
    assert result.metrics["num_tokens"] == metrics["num_tokens"]
    for name in ("loss", "entropy", "kl", "grad_norm"):
        assert result.metrics[name] == pytest.approx(metrics[name], rel=BF16_BOUND), name
    assert_close(result.gradients, gradients, BF16_BOUND)
