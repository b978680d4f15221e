"""The critic on the real schedule: the reference's gradient, metrics and values for any cut."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.errors import ContractError, InputError
from tests.mcore import harness
from tests.mcore.harness import Layout, assert_close, replace
from tests.reference import mini_batch, tiny_llama
from tests.spawn import run_ranks

BOUND = 1e-5
CLIP, COEF = 0.3, 0.7
ONE = Layout(micro_batch_size=8, reduction="sequence_mean")
CUTS = {
    "one micro-batch": ONE,
    "two": replace(ONE, micro_batch_size=4),
    "four": replace(ONE, micro_batch_size=2),
    "DP 2": replace(ONE, micro_batch_size=2, dp=2),
    "DP 2, distributed optimizer": replace(
        ONE, micro_batch_size=2, dp=2, distributed_optimizer=True
    ),
    "TP 2": replace(ONE, micro_batch_size=4, tp=2),
    "TP 2 with sequence parallelism": replace(
        ONE, micro_batch_size=4, tp=2, sequence_parallel=True
    ),
    "PP 2": replace(ONE, micro_batch_size=4, pp=2),
    "PP 2, of a tied policy": replace(ONE, micro_batch_size=4, pp=2, tied=True),
    "PP 2, VPP 2": replace(ONE, micro_batch_size=4, pp=2, vpp=2, layers=4),
    "CP 2": replace(ONE, micro_batch_size=4, cp=2),
    "packed, CP 2": replace(ONE, micro_batch_size=4, cp=2, packed=True),
}


class CriticRun(NamedTuple):
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    values: list[Tensor]


def score() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return 0.3 * torch.randn(1, tiny_llama.SIZES["hidden"], generator=generator)


def weights_of(layout: Layout) -> dict[str, Tensor]:
    weights = harness._hf_weights(layout) | {"score.weight": score()}
    weights.pop("lm_head.weight", None)
    return weights


def targets(row: mini_batch.Row, i: int) -> dict[str, Tensor]:
    """Old values and returns of a row; NaN where nothing may look."""
    generator = torch.Generator().manual_seed(100 + i)
    old, returns = torch.randn(2, len(row["tokens"]), generator=generator)
    return {
        name: torch.where(row["loss_mask"], x, torch.nan)
        for name, x in (("old_values", old), ("returns", returns))
    }


def critic_batches(layout: Layout, groups: Any) -> list[dict[str, Tensor]]:
    """This rank's micro-batches with the weights of the whole mini-batch."""
    from megatron_rl_loss.mcore.collate import collate, with_sequence_weights
    from megatron_rl_loss.parallel.context_parallel import sequence_multiple

    rows = harness.rows_of(layout)
    sequences = [
        {"tokens": row["tokens"], "loss_mask": row["loss_mask"], **targets(row, i)}
        for i, row in enumerate(rows)
    ]
    weighted = with_sequence_weights(sequences, layout.reduction)
    cut = {"multiple": sequence_multiple(layout.tp, layout.cp), "packed": layout.packed}
    if layout.pp > 1:
        cut["width"] = layout.pad_to
    plan = harness.plan_of(layout, len(rows), groups.dp.rank())
    return [collate(weighted, micro, **cut) for micro in plan]


def build_critic(layout: Layout, weights: dict[str, Tensor]) -> tuple[list[Any], Any, Any]:
    from megatron_rl_loss.mcore.model import build_gpt_model, transformer_config
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
    from megatron_rl_loss.mcore.optimizer import build_optimizer, wrap_with_ddp
    from megatron_rl_loss.mcore.ranks import start_ranks
    from megatron_rl_loss.mcore.value_model import value_spec, value_weights
    from megatron_rl_loss.mcore.weights import load_hf_weights

    sizes = dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
    )
    start_ranks(**sizes)
    hf_config = tiny_llama.hf_config(layers=layout.layers, tied=layout.tied)
    spec = value_spec(model_spec_from_hf(hf_config))
    config = transformer_config(spec, **sizes, sequence_parallel=layout.sequence_parallel)
    chunks = build_gpt_model(spec, config, padded_vocab_size=harness.PADDED_VOCAB)
    load_hf_weights(chunks, value_weights(weights, spec), spec)
    chunks = wrap_with_ddp(chunks, use_distributed_optimizer=layout.distributed_optimizer)
    return chunks, build_optimizer(chunks, lr=1e-2, eps=1e-3, clip_grad=1e9), spec


def run_critic(layout: Layout) -> CriticRun:
    """On each rank: one optimizer step of the critic, and its values before it."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics
    from megatron_rl_loss.mcore.value_step import make_value_step, token_values

    chunks, optimizer, spec = build_critic(layout, weights_of(layout))
    try:
        groups = parallel_groups()
        batches = critic_batches(layout, groups)
        values = token_values(chunks, batches)
        step = make_value_step(value_clip=CLIP, value_coef=COEF)
        metrics = share_metrics(run_forward_backward(step, chunks, batches), groups)
        sharded = layout.distributed_optimizer
        gradients = {} if sharded else harness.export_gradients(chunks, spec)
        metrics["grad_norm"] = float(optimizer.step()[1])
        return CriticRun(metrics, gradients, harness.export(chunks, spec), values)
    finally:
        parallel_state.destroy_model_parallel()


@functools.cache
def critic(cut: str) -> CriticRun:
    ranks = run_ranks(run_critic, CUTS[cut].world_size, CUTS[cut])
    for rank in ranks[1:]:
        assert rank.metrics == ranks[0].metrics
    return ranks[0]


@functools.cache
def reference(layers: int, tied: bool) -> tuple[dict[str, float], dict[str, Tensor], list]:
    """Loss, metrics and gradient, token by token in float64; and every position's value."""
    layout = replace(ONE, layers=layers, tied=tied)
    rows = harness.rows_of(layout)
    weights = mini_batch.weights(rows, ONE.reduction, [list(range(len(rows)))], 0)
    params = {n: w.double().requires_grad_() for n, w in weights_of(layout).items()}
    total, errors, returns, clipped, values = torch.zeros(()), [], [], 0, []
    for i, (row, w) in enumerate(zip(rows, weights, strict=True)):
        as_head = params | {"lm_head.weight": params["score.weight"]}
        v = tiny_llama.logits(as_head, row["tokens"])[:, 0]
        values.append(v.detach())
        aims = targets(row, i)
        for t in row["loss_mask"].nonzero().flatten().tolist():
            old, target = float(aims["old_values"][t]), float(aims["returns"][t])
            free = (v[t] - target) ** 2
            held = (v[t].clamp(old - CLIP, old + CLIP) - target) ** 2
            total = total + COEF * w[t] * torch.maximum(free, held) / 2
            clipped += bool(held > free)
            errors.append(target - v[t].item())
            returns.append(target)
    gradients = dict(zip(params, torch.autograd.grad(total, list(params.values())), strict=True))
    spread = torch.tensor(returns).double().var(unbiased=False)
    metrics = {
        "loss": total.item(),
        "num_tokens": float(len(errors)),
        "value_clip_fraction": clipped / len(errors),
        "explained_variance": float(1 - torch.tensor(errors).double().var(unbiased=False) / spread),
        "grad_norm": math.sqrt(sum(float(g.square().sum()) for g in gradients.values())),
    }
    return metrics, gradients, values


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_and_metrics_equal_the_reference_for_any_cut(cut):
    got = critic(cut)
    metrics, gradients, _ = reference(CUTS[cut].layers, CUTS[cut].tied)
    assert 0 < metrics["value_clip_fraction"] < 1
    for name, want in metrics.items():
        assert got.metrics[name] == pytest.approx(want, rel=BOUND), name
    if got.gradients:
        assert_close(got.gradients, gradients, BOUND)


@pytest.mark.parametrize(
    "cut", [cut for cut in CUTS if CUTS[cut].layers == 2 and not CUTS[cut].tied]
)
def test_optimizer_step_equals_that_of_one_micro_batch(cut):
    assert_close(critic(cut).parameters, critic("one micro-batch").parameters, BOUND)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if not CUTS[cut].packed])
def test_values_without_gradient_are_those_of_the_reference_at_every_position(cut):
    layout = CUTS[cut]
    values = reference(layout.layers, layout.tied)[2]
    plan = harness.plan_of(layout, len(values), 0)
    for micro, got in zip(plan, critic(cut).values, strict=True):
        for row, i in enumerate(micro):
            want = values[i].float()
            torch.testing.assert_close(got[row, : len(want)], want, rtol=1e-4, atol=1e-5)


def run_refusals() -> tuple[str, str, float]:
    """Messages for a policy handed to a critic's step and for missing weights; the first values."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward
    from megatron_rl_loss.mcore.value_model import put_value_head
    from megatron_rl_loss.mcore.value_step import make_value_step, token_values

    messages = []
    layout = replace(ONE, tied=True)
    chunks, _, _ = harness.build(layout)
    batches = critic_batches(layout, parallel_groups())
    for run in (
        lambda: run_forward_backward(make_value_step(), chunks, batches),
        lambda: put_value_head(chunks),
    ):
        with pytest.raises(ContractError) as error:
            run()
        messages.append(str(error.value))
    parallel_state.destroy_model_parallel()
    chunks, _, _ = build_critic(layout, harness._hf_weights(layout))
    largest = max(float(values.abs().max()) for values in token_values(chunks, batches))
    for batch in batches:
        del batch["loss_weights"]
    with pytest.raises(InputError) as error:
        run_forward_backward(make_value_step(), chunks, batches)
    messages.append(str(error.value))
    parallel_state.destroy_model_parallel()
    return *messages, largest


def test_a_new_critic_values_everything_at_zero_and_wrong_models_are_refused():
    headless, tied, unweighted, largest = run_ranks(run_refusals, 1)[0]
    assert "no ValueHead; call put_value_head(chunks) before" in headless
    assert "share_embeddings_and_output_weights=False" in tied
    assert "needs 'loss_weights'" in unweighted
    assert largest == 0.0
