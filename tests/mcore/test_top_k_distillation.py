"""Distillation from stored top-k log-probs on the real schedule: the reference's gradient, any cut.

The teacher's tensors [T, k] are dirty wherever nothing is trained: ids out of range and NaN.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

from megatron_rl_loss.errors import InputError
from tests.mcore import harness
from tests.mcore.harness import Layout, Outcome, assert_close, replace
from tests.reference import mini_batch, tiny_llama
from tests.spawn import RankError, run_ranks

BOUND = 1e-5
K = 5
VOCAB = tiny_llama.SIZES["vocab"]
TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01, "temperature": 0.8}
BASE = Layout(loss="top_k_distillation", settings={"with_rest": True, **TERMS})
BLOCKS = {"lm_head": "fused", "memory_budget_bytes": 0}
FUSED = replace(BASE, settings=BASE.settings | BLOCKS)
CUTS = {
    "one micro-batch": replace(BASE, micro_batch_size=8),
    "two": replace(BASE, micro_batch_size=4),
    "four": BASE,
    "without the rest": replace(BASE, settings={**TERMS, "with_rest": False}),
    "DP 2": replace(BASE, dp=2),
    "TP 2": replace(BASE, tp=2),
    "TP 2 with sequence parallelism": replace(BASE, tp=2, sequence_parallel=True),
    "CP 2": replace(BASE, cp=2),
    "PP 2": replace(BASE, pp=2),
    "PP 2, VPP 2": replace(BASE, pp=2, vpp=2, layers=4),
    "packed": replace(BASE, micro_batch_size=3, packed=True),
    "packed, CP 2": replace(BASE, micro_batch_size=3, packed=True, cp=2),
    "packed, PP 2": replace(BASE, packed=True, pp=2),
    "head in blocks": FUSED,
    "head in blocks, TP 2 with SP": replace(FUSED, tp=2, sequence_parallel=True),
    "head in blocks, packed, CP 2": replace(FUSED, micro_batch_size=3, packed=True, cp=2),
}


def teacher_of(row: mini_batch.Row, seed: int, dirty: bool) -> dict[str, torch.Tensor]:
    """Returns [T, k] each: the top k of random logits, garbage where nothing is trained.

    One entry in each row of tokens is unused: id 0 with the log-prob -inf.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(row["tokens"]), VOCAB, generator=generator)
    top = logits.log_softmax(-1).topk(K)
    log_probs, ids = top.values, top.indices
    log_probs[1, K - 1], ids[1, K - 1] = -torch.inf, 0
    masked = ~row["loss_mask"].unsqueeze(1)
    low, nan = (-7, torch.nan) if dirty else (0, 0.0)
    ids = torch.where(masked, torch.where(torch.arange(K) % 2 == 0, low, 10**6 * -low), ids)
    return {
        "teacher_top_ids": ids,
        "teacher_top_log_probs": torch.where(masked, nan, log_probs),
    }


def rows_of(layout: Layout, dirty: bool = True) -> list[dict[str, Any]]:
    rows = []
    for i, row in enumerate(harness.rows_of(layout)):
        rows.append({**row, "group_ids": row["group_id"], **teacher_of(row, 100 + i, dirty)})
        del rows[-1]["group_id"]
    return rows


def batches_of(layout: Layout, dp_rank: int, dirty: bool) -> list[dict[str, Any]]:
    from megatron_rl_loss.mcore.collate import collate, with_sequence_weights
    from megatron_rl_loss.parallel.context_parallel import sequence_multiple

    rows = with_sequence_weights(rows_of(layout, dirty), layout.reduction)
    multiple = sequence_multiple(layout.tp, layout.cp)
    width = None
    if layout.pp > 1:
        width = layout.pad_to * (layout.micro_batch_size if layout.packed else 1)
    return [
        collate(rows, micro, packed=layout.packed, multiple=multiple, width=width)
        for micro in harness.plan_of(layout, len(rows), dp_rank)
    ]


def run_once(layout: Layout, dirty: bool = True, **changes: Any) -> Outcome:
    """On each rank: metrics and whole gradients. `changes` of the first micro-batch of rank 0."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.logprobs import head_plan
    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics

    sizes = head_plan.MIN_BLOCK, head_plan.MAX_BLOCK
    chunks, _, spec = harness.build(layout)
    try:
        head_plan.MIN_BLOCK = head_plan.MAX_BLOCK = 8
        groups = parallel_groups()
        batches = batches_of(layout, groups.dp.rank(), dirty)
        batches[0].update(changes)
        collected = run_forward_backward(harness.make_step(layout), chunks, batches)
        metrics = share_metrics(collected, groups)
        return Outcome(metrics, harness.export_gradients(chunks, spec), {})
    finally:
        head_plan.MIN_BLOCK, head_plan.MAX_BLOCK = sizes
        parallel_state.destroy_model_parallel()


@functools.cache
def reference(with_rest: bool, layers: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Token by token in float64, from the whole softmax."""
    layout = replace(BASE, layers=layers)
    rows = rows_of(layout)
    plan = harness.plan_of(layout, len(rows), 0)
    weights = mini_batch.weights(harness.rows_of(layout), "token_mean", plan, harness.MAX_SEQ_LEN)
    params = {n: w.double().requires_grad_() for n, w in harness._hf_weights(layout).items()}
    total, mass, num = 0.0, 0.0, 0
    for row, w in zip(rows, weights, strict=True):
        log_p = (tiny_llama.logits(params, row["tokens"]) / TERMS["temperature"]).log_softmax(-1)
        for t in row["loss_mask"].nonzero().flatten().tolist():
            loss, q = teacher_kl(log_p[t], row, t, with_rest)
            gap = log_p[t, row["tokens"][t + 1]] - float(row["ref_log_probs"][t])
            loss = loss + TERMS["kl_coef"] * ((-gap).exp() - 1 + gap)
            loss = loss + TERMS["entropy_coef"] * (log_p[t].exp() * log_p[t]).sum()
            total, mass, num = total + w[t] * loss, mass + q, num + 1
    total.backward()
    metrics = {"loss": total.item(), "teacher_mass": mass / num, "num_tokens": float(num)}
    return metrics, {n: p.grad for n, p in params.items()}


def teacher_kl(log_p: torch.Tensor, row: dict, t: int, with_rest: bool) -> tuple[Any, float]:
    loss, rest_q, rest_p = 0.0, 1.0, 1.0
    pairs = zip(row["teacher_top_ids"][t], row["teacher_top_log_probs"][t].double(), strict=True)
    for token, log_q in pairs:
        if log_q == -torch.inf:
            continue
        loss = loss + log_q.exp() * (log_q - log_p[token])
        rest_q, rest_p = rest_q - log_q.exp().item(), rest_p - log_p[token].exp()
    if with_rest:
        loss = loss + rest_q * (rest_q / rest_p).log()
    return loss, 1.0 - rest_q


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_and_metrics_equal_the_reference_for_any_cut(cut):
    layout = CUTS[cut]
    metrics, gradients = reference(layout.settings["with_rest"], layout.layers)
    ranks = run_ranks(run_once, layout.world_size, layout)
    assert all(rank.metrics == ranks[0].metrics for rank in ranks)
    for name, want in metrics.items():
        assert ranks[0].metrics[name] == pytest.approx(want, rel=BOUND), name
    assert_close(ranks[0].gradients, gradients, BOUND)


@pytest.mark.parametrize("layout", [BASE, FUSED], ids=["logits", "head in blocks"])
def test_what_masked_positions_hold_changes_no_bit(layout):
    (dirty,) = run_ranks(run_once, 1, layout, True)
    (clean,) = run_ranks(run_once, 1, layout, False)
    assert dirty.metrics == clean.metrics
    assert all(torch.equal(dirty.gradients[n], g) for n, g in clean.gradients.items())


def step_and_batch() -> tuple[Any, dict[str, Any]]:
    return harness.make_step(BASE), batches_of(BASE, 0, True)[0]


def test_the_step_says_what_it_needs_and_what_is_missing():
    step, batch = step_and_batch()
    step.check([batch])
    assert step.objective.needs[:2] == ("teacher_top_log_probs", "teacher_top_ids")
    for name in ("teacher_top_ids", "teacher_top_log_probs"):
        fewer = {k: v for k, v in batch.items() if k != name}
        with pytest.raises(InputError, match=f"micro-batch 0: micro-batch lacks '{name}'"):
            step.check([fewer])
    without = {k: v for k, v in batch.items() if k != "loss_weights"}
    with pytest.raises(InputError, match="'top_k_distillation'.*need 'loss_weights'"):
        step.check([without])


def test_a_trained_id_on_a_padding_column_is_an_error_that_names_it():
    _, batch = step_and_batch()
    ids = batch["teacher_top_ids"].clone()
    row, position = batch["loss_mask"].nonzero()[2].tolist()
    ids[row, position, 3] = VOCAB  # the model has 64 columns
    # the fused head has positions before rows
    for layout, place in ((BASE, f"{row}, {position}"), (FUSED, f"{position}, {row}")):
        text = rf"token_id {VOCAB} at trained position \[{place}, 3\]"
        with pytest.raises(RankError, match=text):
            run_ranks(functools.partial(run_once, teacher_top_ids=ids), 1, layout)
