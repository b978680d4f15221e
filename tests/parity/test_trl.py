"""The same inputs through TRL's trainers; runs only where TRL can be imported (tested: 1.16).

TRL's formulas are methods of its trainers. They are called here on a stand-in that has the
settings and gives the log-probs, in place of a model. Deliberate differences, which the inputs
below avoid:

* TRL does not bound log-ratios; here they end at +-20, and k3 goes on as its tangent.
* TRL takes one advantage per sequence; here one per token (both are given the same ones).
* TRL's cispo has one bound, absolute (`epsilon_high`); here two offsets, with low=1 for none. Its
  clip metric counts only A > 0; here every token whose weight was changed.
* TRL's luspo is `gspo` with sums over tokens: `seq_mean_token_sum_norm` with max_seq_len=1.
* TRL reports its weighted KL, here the plain one is; and TRL's takes the sequence's ratio if the
  loss does; here always the token's.
* TRL's entropy bonus is a mean over the micro-batch's tokens; here it has the loss's weights.
* TRL's adaptive entropy still rewards an entropy equal to its target; here it must be below.
* TRL's dapo and cispo divide by the tokens of the generation batch, shared evenly between its
  optimizer steps; here by those of the step.
* TRL's rloo clips the ratio of the whole sequence; here `policy_gradient` (equal on-policy).
* TRL adds 1e-4 to a group's standard deviation; here eps is a setting, 1e-6 by default.
* Constant groups have advantage 0 here; in TRL rounding may leave a little more.

Without a counterpart here: vespo, `top_entropy_quantile`, `scale_rewards="batch"`, several reward
functions normalised apart, DPO's other losses, generalised JSD.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax

from megatron_rl_loss.logprobs.vocab_parallel import vocab_parallel_outputs
from megatron_rl_loss.losses.distillation import on_policy_distillation, top_k_forward_kl
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.losses.off_policy import OffPolicy, correction
from megatron_rl_loss.losses.registry import LOSSES
from megatron_rl_loss.ops.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from megatron_rl_loss.ops.coefficients import AdaptiveEntropyCoef
from megatron_rl_loss.ops.kl import kl_penalty, kl_shaped_rewards
from megatron_rl_loss.ops.preferences import dpo_advantages
from megatron_rl_loss.ops.sequences import Sequences
from megatron_rl_loss.parallel.token_weights import token_weights
from tests.parity.trl_stand_in import (
    dpo_model,
    dpo_trainer,
    scored,
    trainer,
    trl_inputs,
    trl_step,
)
from tests.unit.loss_cases import random_case
from tests.unit.test_losses import objective_step

GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer
RLOOTrainer = pytest.importorskip("trl.trainer.rloo_trainer", exc_type=ImportError).RLOOTrainer
dpo = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError)
distillation = pytest.importorskip("trl.trainer.distillation_trainer", exc_type=ImportError)
utils = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)


def case():
    return random_case(rows=6, length=9, dtype=torch.float32)[:2]


CLIP = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3}
BY_SEQUENCE = {"importance_sampling_level": "sequence"}
NORM = "seq_mean_token_sum_norm"
CASES = {
    "grpo": ({"loss_type": "grpo"}, "ppo_clip", CLIP, "sequence_mean"),
    "bnpo": ({"loss_type": "bnpo"}, "ppo_clip", CLIP, "token_mean"),
    "dapo": ({"loss_type": "dapo"}, "ppo_clip", CLIP, "token_mean"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "ppo_clip", CLIP, NORM),
    "delta": (
        {"loss_type": "dapo", "delta": 1.5},
        "dual_clip",
        CLIP | {"dual_clip_ratio": 1.5},
        "token_mean",
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        "cispo",
        {"clip_ratio_low": 1.0, "clip_ratio_high": 0.2},
        "token_mean",
    ),
    "sapo": ({"loss_type": "sapo"}, "sapo", {}, "sequence_mean"),
    "gspo": (BY_SEQUENCE | {"loss_type": "grpo"}, "gspo", CLIP, "sequence_mean"),
    "gspo by token": (BY_SEQUENCE | {"loss_type": "dapo"}, "gspo", CLIP, "token_mean"),
    "luspo": (BY_SEQUENCE | {"loss_type": "luspo"}, "gspo", CLIP, NORM),
}
TERMS = {
    "alone": ({}, {}),
    "KL": ({"beta": 0.3}, {"kl_coef": 0.3}),
    "IS weights": (
        {"use_vllm": True, "beta": 0.3},
        {"off_policy": {"is_level": "given"}, "kl_coef": 0.3},
    ),
    "off-policy mask": (
        {"off_policy_mask_threshold": 0.05},
        {"off_policy": {"negative_max_kl": 0.05}},
    ),
    "weighted KL": (
        {"beta": 0.3, "use_bias_correction_kl": True},
        {"kl_coef": 0.3, "kl_is_weighted": True},
    ),
}


PAIRS = [
    (name, terms)
    for name in CASES
    for terms in TERMS
    if terms != "weighted KL" or "importance_sampling_level" not in CASES[name][0]
]
LENGTH_NORM = {"dr_grpo": 13, "luspo": 1}


@pytest.mark.parametrize(("name", "terms"), PAIRS)
def test_policy_gradient_equals_trl(name, terms):
    settings, loss, loss_settings, reduction = CASES[name]
    tensors, mask = case()
    added, our_terms = TERMS[terms]
    if terms == "IS weights":
        tensors["rollout_is_weights"] = 2.0 * torch.rand(mask.shape)
    want, want_gradient, want_metrics = trl_step(tensors, mask, **settings, **added)
    weights = token_weights(mask, reduction, max_seq_len=LENGTH_NORM.get(name))
    objective = Objective(loss, loss_settings, **our_terms)
    got, gradient, metrics = objective_step(objective, tensors, mask, weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-3
    for ours, theirs in (("clip_fraction", "clip_ratio/region_mean"), ("kl", "kl")):
        if theirs in want_metrics and (terms, ours) != ("weighted KL", "kl"):
            assert mean_of(metrics[ours]) == pytest.approx(want_metrics[theirs][0], rel=1e-5)
    if terms == "off-policy mask":
        assert 0.0 < mean_of(metrics["rejected_fraction"]) < 0.5


def mean_of(pair):
    return float(pair[0] / pair[1])


ACCUMULATED = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean_legacy",
    "dapo": "token_mean",
    "dr_grpo": NORM,
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulated_gradient_equals_trl(name):
    tensors, mask = case()
    halves = (slice(0, 3), slice(3, 6))
    want = [
        trl_step(
            {k: v[rows] for k, v in tensors.items()},
            mask[rows],
            loss_type=name,
            num_items=mask.sum(),
            current_gradient_accumulation_steps=2,
            steps_per_generation=2,
        )[1]
        for rows in halves
    ]
    weights = token_weights(
        mask,
        ACCUMULATED[name],
        max_seq_len=13,
        micro_batch_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    _, gradient, _ = objective_step(Objective("ppo_clip", CLIP), tensors, mask, weights)
    torch.testing.assert_close(gradient, torch.cat(want), rtol=1e-5, atol=1e-7)
    assert mask[:3].sum() != mask[3:].sum()  # or legacy would be no case of its own


def test_geometric_mean_equals_trl():
    module = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer", exc_type=ImportError)
    tensors, mask = case()
    sequence_advantages = tensors["advantages"].sum(1)
    want, want_gradient, want_metrics = trl_step(
        tensors | {"advantages": sequence_advantages},
        mask,
        module.GMPOTrainer._compute_loss,
        epsilon_low=0.1,
        epsilon_high=0.2,
        beta=0.3,
    )
    tensors["advantages"] = sequence_advantages[:, None].expand_as(mask)
    objective = Objective("gmpo", {"log_clip_low": 0.1, "log_clip_high": 0.2}, kl_coef=0.3)
    got, gradient, metrics = objective_step(
        objective, tensors, mask, token_weights(mask, "sequence_mean")
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-7)
    assert mean_of(metrics["clip_fraction"]) == want_metrics["clip_ratio/region_mean"][0]


def test_on_policy_rloo_equals_trl():
    tensors, mask = case()
    sequence_advantages = torch.tensor([1.0, 3.0, -2.0, 0.5, -0.5, 1.5])
    log_probs = tensors["log_probs"].clone().requires_grad_()
    inputs = trl_inputs(tensors | {"advantages": sequence_advantages}, mask)
    inputs["old_logps"] = (tensors["log_probs"] * mask).sum(1)
    made = trainer(log_probs, torch.zeros_like(log_probs))
    RLOOTrainer._compute_loss(made, None, inputs).backward()
    tensors["advantages"] = sequence_advantages[:, None].expand_as(mask)
    weights = token_weights(mask, NORM, max_seq_len=1)
    _, gradient, _ = objective_step(Objective("policy_gradient"), tensors, mask, weights)
    torch.testing.assert_close(gradient, log_probs.grad, rtol=1e-5, atol=1e-7)


def test_entropy_bonus_equals_trl():
    tensors, mask = case()
    grads = []
    for ours in (True, False):
        entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
        entropy.requires_grad_()
        if ours:
            given = {k: v for k, v in tensors.items() if k != "log_probs"}
            loss, _ = Objective("ppo_clip", CLIP, entropy_coef=0.2)(
                tensors["log_probs"], entropy, given, mask, token_weights(mask, "token_mean")
            )
            loss.backward()
        else:
            loss, _, _ = trl_step(tensors, mask, None, entropy, loss_type="dapo", entropy_coef=0.2)
        grads.append((loss.detach(), entropy.grad))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_adaptive_entropy_equals_trl():
    tensors, mask = case()
    settings = {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_target": 1.0}
    ours = AdaptiveEntropyCoef(inner=0.5, target=1.0, step=0.25)
    state = trainer(entropy_coef=0.5, **settings)
    for entropy in (0.4, 0.8, 0.9, 1.5, 0.9, 2.0, 3.0, 1.1, 3.0, 0.1):
        state._get_per_token_logps_and_entropies = lambda *_, h=entropy, **__: (
            tensors["log_probs"].clone().requires_grad_(),
            torch.full(mask.shape, h),
            None,
        )
        GRPOTrainer._compute_loss(state, None, trl_inputs(tensors, mask))
        applied = state.entropy_coef if state._last_world_entropy <= 1.0 else 0.0
        assert ours.update(entropy) == pytest.approx(applied)
        assert ours.inner == pytest.approx(state.entropy_coef)


def test_defaults_equal_trl():
    config = pytest.importorskip("trl.trainer.grpo_config", exc_type=ImportError).GRPOConfig
    theirs = {name: field.default for name, field in config.__dataclass_fields__.items()}
    assert LOSSES["ppo_clip"].settings["clip_ratio_low"] == theirs["epsilon"]
    assert LOSSES["sapo"].settings == {
        "tau_positive": theirs["sapo_temperature_pos"],
        "tau_negative": theirs["sapo_temperature_neg"],
    }
    coef = AdaptiveEntropyCoef(inner=0.0, target=1.0)
    assert (coef.step, coef.coef_max) == (theirs["entropy_coef_delta"], theirs["entropy_coef_max"])


REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.5, -2.0, 3.0, 1.0, 1.0, 1.0])
GROUPS = torch.tensor([4, 4, 4, 9, 9, 9, 2, 2, 2])


def test_advantages_equal_trl():
    pairs = [
        (scored(GRPOTrainer, REWARDS, 3), grpo_advantages(REWARDS, GROUPS, eps=1e-4)),
        (
            scored(GRPOTrainer, REWARDS, 3, scale_rewards="none"),
            dr_grpo_advantages(REWARDS, GROUPS),
        ),
        (scored(RLOOTrainer, REWARDS, 3), rloo_advantages(REWARDS, GROUPS)),
    ]
    for want, got in pairs:
        torch.testing.assert_close(got, want["advantages"], rtol=1e-5, atol=1e-6)
        assert got.unique().numel() > 5


def prefix_case():
    tensors, _ = case()
    mask = torch.arange(9)[None] < torch.tensor([9, 1, 4, 2, 5, 7])[:, None]
    full = random_case(rows=6, length=9, dtype=torch.float32, seed=4)[0]
    fill = {k: torch.where(tensors[k] == 0, full[k] - 0.1, tensors[k]) for k in tensors}
    return {k: torch.where(mask, v, 0.0) for k, v in fill.items()}, mask


def test_kl_in_the_reward_equals_trl():
    tensors, mask = prefix_case()
    rewards, groups = REWARDS[:6], GROUPS[:6]
    want = scored(RLOOTrainer, rewards, 3, tensors, mask, beta=0.3)["advantages"]
    kl = kl_penalty(tensors["old_log_probs"], tensors["ref_log_probs"], "k1")
    shaped = kl_shaped_rewards(rewards, kl, mask, kl_coef=0.3).sum(1)
    torch.testing.assert_close(rloo_advantages(shaped, groups), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_importance_weights_equal_trl(level, outside):
    tensors, mask = prefix_case()
    want = scored(
        GRPOTrainer,
        REWARDS[:6],
        3,
        tensors,
        mask,
        use_vllm=True,
        vllm_importance_sampling_mode=f"{level}_{outside}",
        vllm_importance_sampling_clip_min=0.7,
        vllm_importance_sampling_clip_max=1.5,
    )["importance_sampling_ratio"]
    settings = OffPolicy(is_level=level, is_min=0.7, is_max=1.5, is_outside=outside)
    got, stats = correction(settings, tensors, Sequences(mask))
    torch.testing.assert_close(got[mask], want.expand_as(got)[mask], rtol=1e-5, atol=1e-6)
    assert 0.0 < stats["is_outside_fraction"][mask].mean() < 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_equal_trl(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(3, 5, 11, generator=generator)
    labels = torch.randint(11, (3, 5), generator=generator)
    results = []
    for ours in (True, False):
        x = logits.clone().requires_grad_()
        if ours:
            out = vocab_parallel_outputs(x, labels, temperature=temperature, with_entropy=True)
            log_probs, entropy = out.log_probs, out.entropy
        else:
            log_probs, entropy = utils.selective_log_softmax_and_entropy(
                x, labels, temperature=temperature
            )
        (log_probs.sum() + 0.3 * entropy.square().sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), x.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_dpo_equals_trl():
    tensors, mask = case()
    mask[1] = mask[2]
    log_probs = torch.where(mask, tensors["log_probs"] - 0.5, 0.0).requires_grad_()
    ref = torch.where(mask, tensors["ref_log_probs"] - 0.5, 0.0)
    sums, ref_sums = log_probs.detach().sum(1), ref.sum(1)
    made = dpo_trainer(0.4)
    whole = torch.nn.functional.pad(mask.long(), (1, 0))
    inputs = {"completion_mask": whole, "input_ids": whole, "attention_mask": whole}
    inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), ref_sums.chunk(2)))
    want = dpo.DPOTrainer._compute_loss(made, dpo_model(log_probs), inputs, False)
    want.backward()
    pairs, chosen = torch.tensor([7, 8, 9, 7, 8, 9]), torch.arange(6) < 3
    advantages, losses = dpo_advantages(sums, ref_sums, pairs, chosen, beta=0.4)
    tensors |= {"log_probs": log_probs.detach(), "advantages": advantages[:, None].expand_as(mask)}
    weights = token_weights(mask, NORM, max_seq_len=1)
    _, gradient, _ = objective_step(Objective("policy_gradient"), tensors, mask, weights)
    torch.testing.assert_close(losses.mean(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient, torch.where(mask, log_probs.grad, 0.0), rtol=1e-5, atol=1e-7
    )


def divergence(student, teacher, beta):
    """TRL's divergence of two distributions given as logits, mean over rows."""
    eye = torch.eye(student.shape[-1])
    mask = torch.ones(1, len(student))
    return distillation._chunked_divergence_loss(
        student[None], teacher[None], eye, eye, mask, beta=beta
    )[0]


def distillation_case():
    student, teacher = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0))
    return student.requires_grad_(), teacher


def test_forward_kl_of_all_tokens_equals_trl():
    student, teacher = distillation_case()
    want = divergence(student, teacher, 0.0)
    (want_gradient,) = torch.autograd.grad(want, student)
    got = top_k_forward_kl(log_softmax(student, -1), log_softmax(teacher, -1)).loss.mean()
    (gradient,) = torch.autograd.grad(got, student)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-6)


def test_expected_on_policy_distillation_equals_trls_reverse_kl():
    student, teacher = distillation_case()
    want = divergence(student, teacher, 1.0)
    (want_gradient,) = torch.autograd.grad(want, student)
    log_probs = log_softmax(student, -1)
    loss = on_policy_distillation(log_probs, log_probs.detach(), log_softmax(teacher, -1)).loss
    got = (log_probs.detach().exp() * loss).sum(-1).mean()  # over all tokens, in place of samples
    (gradient,) = torch.autograd.grad(got, student)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-6)
