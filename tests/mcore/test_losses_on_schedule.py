"""Every loss on the real model, schedule and DDP: the reference's gradient for any cut."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from megatron_rl_loss.losses.registry import LOSSES
from tests.mcore import harness
from tests.mcore.harness import Layout, Outcome, assert_close, replace
from tests.reference import losses as reference
from tests.reference import mini_batch, tiny_llama
from tests.spawn import run_ranks
from tests.unit.loss_cases import LABEL_LOSSES, SEQUENCE_LEVEL, SETTINGS

BOUND = 2e-5
TENSORS = ("advantages", "old_log_probs", "rollout_log_probs")
ON_SCHEDULE = LABEL_LOSSES
ANY_CUT = [name for name in ON_SCHEDULE if not LOSSES[name].depends_on_micro_batch]
WHOLE_SEQUENCE = [name for name in LOSSES if "sequences" in LOSSES[name].needs]
HOMOGENEOUS = [name for name in ON_SCHEDULE if LOSSES[name].homogeneous]
CORRECTIONS = {
    "sequence IS": SEQUENCE_LEVEL["sequence IS"]["off_policy"],
    "any token": {"reject_level": "any_token", "reject_min": 0.1, "reject_max": 20.0},
    "icepop": {"is_level": "token", "is_min": 0.5, "is_max": 5.0, "is_outside": "mask"},
    "negative sequences": {"negative_max_kl": 0.05},
}
OTHER_TERMS = {"kl_coef": 0.1, "kl_is_weighted": True, "entropy_coef": 0.02, "entropy_max": 3.9}

ONE = Layout(micro_batch_size=8, reduction="sequence_mean")
CUTS = {
    "one micro-batch": ONE,
    "two": replace(ONE, micro_batch_size=4),
    "four": replace(ONE, micro_batch_size=2),
    "DP 2": replace(ONE, micro_batch_size=2, dp=2),
}
SEQUENCE_CUTS = {
    "CP 2": replace(ONE, micro_batch_size=3, cp=2),
    "packed": replace(ONE, micro_batch_size=3, packed=True),
    "packed, CP 2": replace(ONE, micro_batch_size=3, packed=True, cp=2),
}
PRE_NORMALISED = replace(CUTS["DP 2"], pre_normalised=True)


def layout_of(name: str, cut: Layout) -> Layout:
    if name in CORRECTIONS:
        settings = {"off_policy": CORRECTIONS[name], **OTHER_TERMS}
        return replace(cut, loss="ppo_clip", settings=settings)
    return replace(cut, loss=name, settings=SETTINGS.get(name, [{}])[-1])


def run_losses(cut: Layout, names: list[str]) -> dict[str, Outcome]:
    """On each rank: forward and backward of the same mini-batch for each loss."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    from megatron_rl_loss.mcore.groups import parallel_groups
    from megatron_rl_loss.mcore.train_step import run_forward_backward, share_metrics

    chunks, _, spec = harness.build(cut)
    outcomes = {}
    try:
        groups = parallel_groups()
        for name in names:
            layout = layout_of(name, cut)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            batches = harness.weighted(layout, groups)
            for batch in batches:  # the mini-batch has no teacher; its reference can be one
                batch["teacher_log_probs"] = batch["ref_log_probs"]
            collected = run_forward_backward(harness.make_step(layout), chunks, batches)
            metrics = share_metrics(collected, groups)
            outcomes[name] = Outcome(metrics, harness.export_gradients(chunks, spec), {})
        return outcomes
    finally:
        parallel_state.destroy_model_parallel()


@functools.cache
def outcomes(cut: str) -> dict[str, Outcome]:
    """Returns the outcome of every loss that is tested with this cut."""
    layout = (CUTS | SEQUENCE_CUTS | {"pre-normalised": PRE_NORMALISED})[cut]
    names = [*WHOLE_SEQUENCE, "ppo_clip", *CORRECTIONS]
    if cut in CUTS:
        names = [*ON_SCHEDULE, *CORRECTIONS]
    if cut == "pre-normalised":
        names = HOMOGENEOUS
    ranks = run_ranks(run_losses, layout.world_size, layout, names, timeout=300)
    for rank in ranks:
        assert all(rank[name].metrics == ranks[0][name].metrics for name in names)
    return ranks[0]


@functools.cache
def reference_log_probs() -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    params = {n: w.double().requires_grad_() for n, w in harness._hf_weights(ONE).items()}
    return params, [trained_log_probs(params, row) for row in harness.rows_of(ONE)]


@functools.cache
def reference_gradient(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss and d loss / d weight, from log-probs and per-token slopes in float64."""
    rows = harness.rows_of(ONE)
    plan = harness.plan_of(ONE, len(rows), 0)
    weights = mini_batch.weights(rows, ONE.reduction, plan, harness.MAX_SEQ_LEN)
    params, log_probs = reference_log_probs()
    sequences = []
    for row, w, values in zip(rows, weights, log_probs, strict=True):
        at = row["loss_mask"].nonzero().flatten().tolist()
        sequences.append(
            [
                {name: float(row[name][t]) for name in TENSORS}
                | {"teacher_log_probs": float(row["ref_log_probs"][t])}
                | {"w": float(w[t]), "log_probs": value.item()}
                for t, value in zip(at, values, strict=True)
            ]
        )
    losses, slopes = getattr(reference, name)(sequences, **layout_of(name, ONE).settings)
    pulled = sum(
        slope * value
        for row, values in zip(slopes, log_probs, strict=True)
        for slope, value in zip(row, values, strict=True)
    )
    gradients = torch.autograd.grad(pulled, list(params.values()), retain_graph=True)
    total = sum(
        t["w"] * loss
        for row, tokens in zip(losses, sequences, strict=True)
        for loss, t in zip(row, tokens, strict=True)
    )
    return total, dict(zip(params, gradients, strict=True))


def trained_log_probs(params, row) -> list[torch.Tensor]:
    log_p = tiny_llama.logits(params, row["tokens"]).log_softmax(-1)
    at = row["loss_mask"].nonzero().flatten().tolist()
    return [log_p[t, row["tokens"][t + 1]] for t in at]


def check(name: str, result: Outcome) -> None:
    loss, gradients = reference_gradient(name)
    assert result.metrics["loss"] == pytest.approx(loss, rel=BOUND, abs=1e-7)
    assert_close(result.gradients, gradients, BOUND)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ANY_CUT)
def test_gradient_equals_the_reference_for_any_cut(name, cut):
    check(name, outcomes(cut)[name])


@pytest.mark.parametrize("name", [name for name in ON_SCHEDULE if name not in ANY_CUT])
def test_gradient_equals_the_reference_for_the_uncut_mini_batch(name):
    check(name, outcomes("one micro-batch")[name])


@pytest.mark.parametrize("cut", SEQUENCE_CUTS)
@pytest.mark.parametrize("name", [*WHOLE_SEQUENCE, "ppo_clip"])
def test_gradient_equals_the_reference_packed_and_with_sequences_split(name, cut):
    check(name, outcomes(cut)[name])


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_pre_normalised_advantages_give_the_same_gradient(name):
    check(name, outcomes("pre-normalised")[name])


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("cut", [*CUTS, *SEQUENCE_CUTS])
def test_corrections_give_the_same_gradient_and_metrics_for_any_cut(name, cut):
    want, got = outcomes("one micro-batch")[name], outcomes(cut)[name]
    assert want.metrics["policy_loss"] != 0 and "mismatch_k3" in want.metrics
    assert got.metrics == pytest.approx(want.metrics, rel=BOUND, abs=1e-7)
    assert_close(got.gradients, want.gradients, BOUND)
