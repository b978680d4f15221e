"""`calculate_per_token_loss` and fp16's loss scale change how Megatron scales, not the gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_rl_loss.errors import ContractError
from tests.mcore import harness
from tests.mcore.harness import Layout, Outcome, assert_close, reference, replace
from tests.spawn import run_ranks

BOUND = 1e-5
BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8})
FLAG_CUTS = {
    "one rank": BASE,
    "DP 2": replace(BASE, dp=2),
    "CP 2": replace(BASE, cp=2),
    "CP 2, DP 2": replace(BASE, cp=2, dp=2, micro_batch_size=1),
    "PP 2, DP 2": replace(BASE, pp=2, dp=2),
    "TP 2 with sequence parallelism": replace(BASE, tp=2, sequence_parallel=True),
}


def with_flag(layout: Layout) -> Outcome:
    return harness.run_layout(layout, calculate_per_token_loss=True)


@pytest.mark.parametrize("cut", FLAG_CUTS)
def test_per_token_flag_gives_the_reference_gradient_and_metrics(cut):  # C06
    layout = FLAG_CUTS[cut]
    metrics, gradients = reference(layout)
    for result in run_ranks(with_flag, layout.world_size, layout):
        for name, want in metrics.items():
            assert result.metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name
        assert_close(result.gradients, gradients, BOUND)


def test_per_token_flag_with_the_distributed_optimizer_takes_the_same_step():
    layout = replace(BASE, dp=2, distributed_optimizer=True)
    whole = run_ranks(harness.run_layout, 1, BASE)[0]
    assert_close(run_ranks(with_flag, 2, layout)[0].parameters, whole.parameters, BOUND)


def flag_changed_behind_the_back(layout: Layout, first: bool) -> str:
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.guard import model_config
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    chunks, _, _ = harness.build(layout, calculate_per_token_loss=first)
    try:
        batches = harness.weighted(layout, parallel_groups())
        step = harness.make_step(layout)
        run_forward_backward(step, chunks, batches)
        model_config(chunks[0]).calculate_per_token_loss = not first
        run_forward_backward(step, chunks, batches)
    except ContractError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return ""


@pytest.mark.parametrize("first", [False, True])
def test_a_flag_changed_after_ddp_was_built_is_refused(first):
    words = f"is {not first}, but it was {first} when DistributedDataParallel was built"
    for message in run_ranks(flag_changed_behind_the_back, 2, replace(BASE, dp=2), first):
        assert words in message and "calculate_per_token_loss=False" in message


# fp16


def fp16_step(layout: Layout, scale: float) -> tuple[dict, dict, dict, dict]:
    """Returns metrics, unscaled gradients, and the weights before and after the step."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.optimizer import build_optimizer
    from megatron_rl_loss.mcore.train_step import train_step

    chunks, _, spec = harness.build(layout, fp16=True)
    try:
        optimizer = build_optimizer(
            chunks, lr=1e-2, eps=1e-3, clip_grad=1e9, initial_loss_scale=scale, min_loss_scale=1.0
        )
        before = harness.export(chunks, spec)
        batches = harness.weighted(layout, parallel_groups())
        metrics = train_step(harness.make_step(layout), chunks, optimizer, batches)
        unscaled = harness.export_gradients(chunks, spec)  # by the optimizer, in place
        return metrics, unscaled, before, harness.export(chunks, spec)
    finally:
        parallel_state.destroy_model_parallel()


FP16_BOUND = 0.005
FP16_CUTS = {
    "one rank": replace(BASE),
    "DP 2": replace(BASE, dp=2),
    "TP 2": replace(BASE, tp=2),
    "PP 2": replace(BASE, pp=2),
}


@pytest.mark.parametrize("scale", [2.0**4, 2.0**10])
@pytest.mark.parametrize("cut", FP16_CUTS)
def test_fp16_gradient_is_the_reference_after_unscaling(cut, scale):
    """Bound: that of bf16 in `test_layouts` (0.04) with 11 significant bits instead of 8: 0.005."""
    layout = FP16_CUTS[cut]
    metrics, gradients = reference(layout, dtype=torch.float16)
    results = run_ranks(fp16_step, layout.world_size, layout, scale)
    for mine, unscaled, before, after in results:
        assert mine["step_skipped"] == 0.0
        assert mine["loss"] == pytest.approx(metrics["loss"], rel=FP16_BOUND)
        assert mine["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=FP16_BOUND)
        assert_close(unscaled, gradients, FP16_BOUND)
        assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("cut", ["one rank", "DP 2"])
def test_fp16_overflow_step_is_skipped_reported_and_changes_no_weight(cut):
    layout = FP16_CUTS[cut]
    for mine, _, before, after in run_ranks(fp16_step, layout.world_size, layout, 2.0**32):
        assert mine["step_skipped"] == 1.0
        assert all(torch.equal(before[name], after[name]) for name in before)
