"""Several forward_backward calls before one step give the gradient of a single call."""

from __future__ import annotations

import pytest
import torch

from tests.mcore.harness import (
    Layout,
    Outcome,
    assert_close,
    build,
    export,
    export_gradients,
    make_step,
    reference,
    replace,
    weighted,
)
from tests.spawn import run_ranks

BOUND = 1e-5
BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8})
CUTS = {
    "one rank": BASE,
    "DP 2": replace(BASE, dp=2, micro_batch_size=1),
    "DP 2, distributed optimizer": replace(
        BASE, dp=2, micro_batch_size=1, distributed_optimizer=True
    ),
    "DP 2, overlap": replace(BASE, dp=2, micro_batch_size=1, overlap_grad_reduce=True),
    "DP 2, distributed optimizer, overlap": replace(
        BASE, dp=2, micro_batch_size=1, distributed_optimizer=True, overlap_grad_reduce=True
    ),
    "TP 2 with sequence parallelism": replace(BASE, tp=2, sequence_parallel=True),
    "PP 2, tied": replace(BASE, pp=2, tied=True),
    "PP 2, VPP 2": replace(BASE, pp=2, vpp=2, layers=4),
    "PP 2, VPP 2, DP 2, overlap": replace(
        BASE, pp=2, vpp=2, dp=2, layers=4, micro_batch_size=1, overlap_grad_reduce=True
    ),
    "CP 2": replace(BASE, cp=2),
}


def two_calls(layout: Layout, steps: int) -> list[Outcome]:
    """On each rank: steps over the same mini-batch, each in calls of its first and second half."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.accumulate import one_gradient_reduction
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    chunks, optimizer, spec = build(layout)
    outcomes = []
    try:
        batches = weighted(layout, parallel_groups())
        half = len(batches) // 2
        for _ in range(steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            with one_gradient_reduction(chunks):
                for part in (batches[:half], batches[half:]):
                    run_forward_backward(make_step(layout), chunks, part)
            gradients = {} if layout.distributed_optimizer else export_gradients(chunks, spec)
            _, grad_norm, _ = optimizer.step()
            outcomes.append(Outcome({"grad_norm": float(grad_norm)}, gradients, {}))
        outcomes[-1].parameters = export(chunks, spec)
        return outcomes
    finally:
        parallel_state.destroy_model_parallel()


def one_call(layout: Layout, steps: int) -> list[Outcome]:
    """As `two_calls`, in one call and without holding anything back."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    chunks, optimizer, spec = build(layout)
    outcomes = []
    try:
        batches = weighted(layout, parallel_groups())
        for _ in range(steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            run_forward_backward(make_step(layout), chunks, batches)
            _, grad_norm, _ = optimizer.step()
            outcomes.append(Outcome({"grad_norm": float(grad_norm)}, {}, {}))
        outcomes[-1].parameters = export(chunks, spec)
        return outcomes
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("cut", CUTS)
def test_two_calls_give_the_gradient_of_one_in_three_steps_in_a_row(cut):
    layout = CUTS[cut]
    metrics, gradients = reference(layout)
    results = run_ranks(two_calls, layout.world_size, layout, 3)
    whole = run_ranks(one_call, 1, replace(BASE, tied=layout.tied, layers=layout.layers), 3)[0]
    for outcomes in results:
        assert outcomes[0].metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=BOUND)
        for mine, expected in zip(outcomes, whole, strict=True):
            want = expected.metrics["grad_norm"]
            assert mine.metrics["grad_norm"] == pytest.approx(want, rel=BOUND)
    if not layout.distributed_optimizer:
        assert_close(results[0][0].gradients, gradients, BOUND)
    assert_close(results[0][-1].parameters, whole[-1].parameters, BOUND)


def held_then_normal(layout: Layout) -> tuple[list[float], bool]:
    """On each rank: a normal step, one in two calls, and a normal one, without optimizer."""
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.accumulate import one_gradient_reduction
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.guard import model_config
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    chunks, _, _ = build(layout)
    config = model_config(chunks[0])
    before = (config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func)
    norms = []
    try:
        batches = weighted(layout, parallel_groups())
        half = len(batches) // 2
        for held in (False, True, False):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            if held:
                with one_gradient_reduction(chunks):
                    for part in (batches[:half], batches[half:]):
                        run_forward_backward(make_step(layout), chunks, part)
            else:
                run_forward_backward(make_step(layout), chunks, batches)
            flat = torch.cat([p.main_grad.flatten() for c in chunks for p in c.parameters()])
            norms.append(float(flat.norm()))
        after = (config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func)
        return norms, before == after
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("overlap", [False, True])
def test_normal_calls_before_and_after_give_the_same_and_the_hooks_come_back(overlap):
    layout = replace(BASE, dp=2, micro_batch_size=1, overlap_grad_reduce=overlap)
    for norms, same_hooks in run_ranks(held_then_normal, 2, layout):
        assert same_hooks
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def misuse(layout: Layout) -> list[str]:
    from megatron.core import parallel_state

    from megatron_rl_loss.errors import ContractError
    from megatron_rl_loss.mcore.accumulate import one_gradient_reduction
    from megatron_rl_loss.mcore.guard import model_config

    chunks, _, _ = build(layout)
    config = model_config(chunks[0])
    finalize = config.finalize_model_grads_func
    said = []
    try:
        for inside in (lambda: None, lambda: one_gradient_reduction(chunks).__enter__()):
            with pytest.raises(ContractError) as caught, one_gradient_reduction(chunks):
                inside()
            said.append(str(caught.value))
            assert config.finalize_model_grads_func is finalize
        with pytest.raises(KeyError), one_gradient_reduction(chunks):
            raise KeyError("from inside")
        assert config.finalize_model_grads_func is finalize
        config.finalize_model_grads_func = None
        with pytest.raises(ContractError) as caught, one_gradient_reduction(chunks):
            pass
        return [*said, str(caught.value)]
    finally:
        parallel_state.destroy_model_parallel()


def test_misuse_is_refused_and_leaves_the_hooks_as_they_were():
    no_call, nested, no_hook = run_ranks(misuse, 1, BASE)[0]
    assert "no forward_backward call" in no_call
    assert "already in effect" in nested
    assert "finalize_model_grads_func is not set" in no_hook


def count_reductions(layout: Layout) -> tuple[int, list[int]]:
    """On each rank: how often gradients were finalized, and each bucket group's reductions."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megatron_rl_loss.mcore.accumulate import one_gradient_reduction
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.guard import model_config
    from megatron_rl_loss.mcore.train_step import run_forward_backward

    chunks, _, _ = build(layout)
    config = model_config(chunks[0])
    finalize, manager = config.finalize_model_grads_func, buffers._coalescing_manager
    finalized, reduced = [], []

    def counted(*args, **kwargs):
        finalized.append(1)
        return finalize(*args, **kwargs)

    def counting_manager(*args, **kwargs):
        reduced.append(1)  # each bucket group's reduction enters it once
        return manager(*args, **kwargs)

    config.finalize_model_grads_func = counted
    buffers._coalescing_manager = counting_manager
    try:
        batches = weighted(layout, parallel_groups())
        groups = chunks[0].bucket_groups
        counts = []
        for _ in range(2):
            chunks[0].zero_grad_buffer()
            before = len(reduced)
            with one_gradient_reduction(chunks):
                for batch in batches:
                    run_forward_backward(make_step(layout), chunks, [batch])
            counts.append((len(reduced) - before) / len(groups))
            run_forward_backward(make_step(layout), chunks, batches)  # counts gradients for overlap
        return len(finalized), counts
    finally:
        buffers._coalescing_manager = manager
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_reduced_exactly_once_after_four_calls(overlap):
    layout = replace(BASE, dp=2, micro_batch_size=1, overlap_grad_reduce=overlap)
    for finalized, reductions in run_ranks(count_reductions, 2, layout):
        assert finalized == 4  # two held steps and two normal calls
        assert reductions == [1, 1]
