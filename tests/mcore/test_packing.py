"""Packed rows give the gradient of padded rows, and sequences in a pack do not see each other."""

from __future__ import annotations

import pytest
import torch

from tests.mcore.harness import Layout, assert_close, build, reference, replace, rows_of, train_once
from tests.spawn import run_ranks

BOUND = 1e-5
BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8}, packed=True)
CUTS = {
    "one by one": replace(BASE, micro_batch_size=1),
    "three in a row": replace(BASE, micro_batch_size=3),
    "all in one row": replace(BASE, micro_batch_size=8),
    "DP 2": replace(BASE, dp=2),
    "CP 2": replace(BASE, cp=2, micro_batch_size=3),
    "TP 2 with sequence parallelism": replace(BASE, tp=2, sequence_parallel=True),
    "PP 2": replace(BASE, pp=2),
    "CP 2, TP 2 with sequence parallelism": replace(
        BASE, cp=2, tp=2, sequence_parallel=True, micro_batch_size=4
    ),
    "CP 2, PP 2": replace(BASE, cp=2, pp=2),
}


@pytest.mark.parametrize("cut", CUTS)
def test_packed_rows_give_the_gradient_and_metrics_of_the_reference(cut):
    metrics, gradients = reference(CUTS[cut])
    result = train_once(CUTS[cut])
    for name, want in metrics.items():
        assert result.metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name
    assert_close(result.gradients, gradients, BOUND)


@pytest.mark.parametrize("reduction", ["token_mean_legacy", "sequence_mean", "prompt_mean"])
def test_every_reduction_counts_the_sequences_in_a_pack(reduction):
    layout = replace(BASE, reduction=reduction, micro_batch_size=3)
    metrics, gradients = reference(layout)
    result = train_once(layout)
    assert result.metrics["loss"] == pytest.approx(metrics["loss"], rel=BOUND)
    assert_close(result.gradients, gradients, BOUND)


def one_of_two(layout: Layout, trained: int, token_of_the_other: int) -> tuple[dict, dict]:
    """On each rank: trains one of two packed sequences; the other's first token is set."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.collate import collate, with_sequence_weights
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics
    from tests.mcore import harness

    chunks, _, spec = build(layout)
    try:
        names = ("tokens", "loss_mask", "advantages", "old_log_probs", "ref_log_probs")
        pair = [{name: row[name].clone() for name in names} for row in rows_of(layout)[1:3]]
        pair[trained]["loss_mask"][:-1] = True
        pair[1 - trained]["loss_mask"][:] = False
        pair[1 - trained]["tokens"][0] = token_of_the_other
        rows = with_sequence_weights(pair, "token_mean")
        batch = collate(rows, (0, 1), packed=True, multiple=2 * layout.cp)
        collected = run_forward_backward(harness.make_step(layout), chunks, [batch])
        metrics = share_metrics(collected, parallel_groups())
        return metrics, harness.export_gradients(chunks, spec)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("trained, num_tokens", [(0, 8), (1, 11)])
@pytest.mark.parametrize("cp", [1, 2])
def test_the_first_token_of_the_other_sequence_changes_no_bit(cp, trained, num_tokens):
    layout = replace(BASE, cp=cp)
    metrics, gradients = run_ranks(one_of_two, cp, layout, trained, 3)[0]
    other_metrics, other_gradients = run_ranks(one_of_two, cp, layout, trained, 30)[0]
    assert metrics == other_metrics and metrics["num_tokens"] == num_tokens
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
    assert any(bool(gradient.any()) for gradient in gradients.values())
