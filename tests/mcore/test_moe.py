"""Mixture of experts: the policy's gradient is that of one rank; auxiliary losses stay means."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.mcore.harness import Layout, assert_close, plan_of, replace
from tests.mcore.moe_harness import NUM_EXPERTS, MoeLayout, MoeOutcome, train_moe

BOUND = 1e-5
BF16_BOUND = 0.046
BASE = Layout(settings={"kl_coef": 0.1, "entropy_coef": 0.01})
WHOLE = MoeLayout(BASE)
CUTS = {
    "micro-batches of 1": MoeLayout(replace(BASE, micro_batch_size=1)),
    "micro-batches of 4": MoeLayout(replace(BASE, micro_batch_size=4)),
    "EP 2": MoeLayout(replace(BASE, dp=2), ep=2),
    "DP 2": MoeLayout(replace(BASE, dp=2)),
    "DP 2, EP 2": MoeLayout(replace(BASE, dp=4), ep=2),
    "TP 2, SP, EP 2": MoeLayout(replace(BASE, tp=2, sequence_parallel=True), ep=2),
    "TP 2, SP, DP 2, EP 2": MoeLayout(replace(BASE, tp=2, dp=2, sequence_parallel=True), ep=2),
    "expert-TP 2": MoeLayout(replace(BASE, tp=2, sequence_parallel=True), etp=2),
    "TP 2, SP, DP 2, EP 2, expert-TP 2": MoeLayout(
        replace(BASE, tp=2, dp=2, sequence_parallel=True), ep=2, etp=2
    ),
    "CP 2, EP 2": MoeLayout(replace(BASE, cp=2), ep=2),
}


@functools.cache
def outcome(layout_name: str) -> MoeOutcome:
    return train_moe(CUTS.get(layout_name, WHOLE))


@pytest.mark.parametrize("cut", CUTS)
def test_policy_gradient_of_dense_expert_and_router_weights_equals_one_rank(cut):
    whole = outcome("one rank")
    result = outcome(cut)
    assert sum("local_experts" in name for name in result.gradients) == 8
    assert any("router" in name for name in result.gradients)
    assert all(float(gradient.norm()) > 0 for gradient in whole.gradients.values())
    assert_close(result.gradients, whole.gradients, BOUND)
    assert_close(result.parameters, whole.parameters, BOUND)
    for name, want in whole.metrics.items():
        assert result.metrics[name] == pytest.approx(want, rel=BOUND, abs=1e-9), name


def test_distributed_optimizer_with_experts_takes_the_same_step():
    layout = MoeLayout(replace(BASE, dp=4, distributed_optimizer=True), ep=2)
    assert_close(train_moe(layout).parameters, outcome("one rank").parameters, BOUND)


# all experts of each token: which ones the router prefers must not depend on a rounding
BF16 = MoeLayout(replace(BASE, bf16=True), top_k=NUM_EXPERTS, weights_in_bf16=True)
BF16_CUTS = {
    "one rank": BF16,
    "micro-batches of 1": replace(BF16, base=replace(BF16.base, micro_batch_size=1)),
    "DP 2, EP 2": replace(BF16, base=replace(BF16.base, dp=2), ep=2),
    "TP 2, SP, EP 2": replace(BF16, base=replace(BF16.base, tp=2, sequence_parallel=True), ep=2),
    "expert-TP 2": replace(BF16, base=replace(BF16.base, tp=2, sequence_parallel=True), etp=2),
    "CP 2, EP 2": replace(BF16, base=replace(BF16.base, cp=2), ep=2),
}


@functools.cache
def fp32_outcome() -> MoeOutcome:
    return train_moe(replace(BF16, base=BASE))


@pytest.mark.parametrize("cut", BF16_CUTS)
def test_bf16_gradient_equals_fp32_within_the_rounding_of_bf16(cut):
    """Against one rank in fp32 with the same bf16 weights; the router's gradient too.

    Bound: as derived in `test_layouts.py`, n roundings on the way to a gradient err like a random
    walk, sqrt(n) * 2^-9. The dense layer counts 14 each way; in the layer with experts the router's
    product, its probabilities, the weighting and the sum over experts come on top, 18. Twice over
    for a weight gradient's two factors, and the head: n = 2 * (2 * (14 + 18) / 2 + 2) * 2 = 136.
    sqrt(136) * 2^-9 = 0.023; the bound is twice that, 0.046.
    """
    result, want = train_moe(BF16_CUTS[cut]), fp32_outcome()
    assert_close(result.gradients, want.gradients, BF16_BOUND)
    assert result.metrics["num_tokens"] == want.metrics["num_tokens"]
    for name in ("loss", "entropy", "kl", "grad_norm"):
        assert result.metrics[name] == pytest.approx(want.metrics[name], rel=BF16_BOUND), name


AUX = MoeLayout(
    replace(BASE, settings={}), aux_loss_coef=0.1, z_loss_coef=0.01, zero_advantages=True
)


def mean_of_micro_batches(layout: MoeLayout) -> dict[str, torch.Tensor]:
    """Returns the mean of the gradients that each micro-batch gives alone, on one rank."""
    plans = [plan_of(layout.base, 8, rank) for rank in range(layout.base.dp)]
    one_rank = replace(layout, base=replace(layout.base, dp=1), ep=1)
    alone = [
        train_moe(replace(one_rank, only_rows=tuple(rows))).gradients
        for plan in plans
        for rows in plan
    ]
    return {name: torch.stack([g[name] for g in alone]).mean(0) for name in alone[0]}


@pytest.mark.parametrize("dp, ep", [(1, 1), (2, 1), (2, 2)])
def test_auxiliary_gradient_is_the_mean_of_the_micro_batches_values(dp, ep):
    """No factor of ours touches it: it is a mean over micro-batches and ranks by definition."""
    layout = replace(AUX, base=replace(AUX.base, dp=dp, micro_batch_size=4 // dp), ep=ep)
    expected = mean_of_micro_batches(layout)
    assert float(expected["decoder.layers.1.mlp.router.weight"].norm()) > 0
    assert_close(train_moe(layout).gradients, expected, BOUND)


@pytest.mark.parametrize("dp, ep", [(1, 1), (2, 2)])
def test_auxiliary_gradient_adds_to_the_policy_gradient(dp, ep):
    base = replace(AUX.base, dp=dp, settings=BASE.settings)
    both = train_moe(replace(AUX, base=base, ep=ep, zero_advantages=False)).gradients
    policy = train_moe(MoeLayout(base, ep=ep)).gradients
    alone = train_moe(
        replace(AUX, base=replace(base, settings={}), ep=ep, zero_advantages=True)
    ).gradients
    assert_close({n: both[n] - policy[n] for n in both}, alone, 1e-4)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dp, ep", [(1, 1), (2, 2)])
def test_fillers_add_nothing_to_policy_or_auxiliary_gradients(dp, ep, recompute):  # C08
    base = replace(BASE, dp=dp)
    layout = MoeLayout(base, ep=ep, recompute=recompute)
    policy = train_moe(replace(layout, fillers=2)).gradients
    assert_close(policy, outcome("one rank").gradients, BOUND)
    layout = replace(AUX, base=replace(AUX.base, dp=dp), ep=ep, recompute=recompute)
    without = train_moe(layout).gradients
    assert float(without["decoder.layers.1.mlp.router.weight"].norm()) > 0
    # the mean over micro-batches: 8 // dp rows in twos, and as many fillers as these
    result = train_moe(replace(layout, fillers=4 // dp)).gradients
    assert_close(result, {name: g / 2 for name, g in without.items()}, BOUND)


def test_fillers_do_not_move_the_expert_bias():  # C08
    layout = MoeLayout(BASE, expert_bias=True)
    without = train_moe(layout).parameters
    name = "module.decoder.layers.1.mlp.router.expert_bias"
    assert float(without[name].norm()) > 0
    assert torch.equal(train_moe(replace(layout, fillers=8)).parameters[name], without[name])
