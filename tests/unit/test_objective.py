from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.parallel.token_batch import make_token_batch
from tests.unit.loss_cases import random_case
from tests.unit.test_losses import objective_step


def entropies(mask, dtype=torch.float64):
    values = torch.linspace(0.1, 2.0, mask.numel(), dtype=dtype).view(mask.shape)
    return values.requires_grad_()


def run(objective, tensors, mask, weights, entropy=None):
    log_probs = tensors["log_probs"].clone().requires_grad_()
    others = {k: v for k, v in tensors.items() if k != "log_probs"}
    loss, metrics = objective(log_probs, entropy, others, mask, weights)
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


def test_terms_add_up_with_their_coefficients():
    tensors, mask, weights = random_case()
    entropy = entropies(mask)
    objective = Objective("importance_sampling", kl_coef=0.3, kl_estimator="k2", entropy_coef=0.05)
    loss, gradient, metrics = run(objective, tensors, mask, weights, entropy)
    d = tensors["log_probs"] - tensors["ref_log_probs"]
    r = (tensors["log_probs"] - tensors["old_log_probs"]).exp()
    policy, kl = -r * tensors["advantages"], d * d / 2
    want = (weights * (policy + 0.3 * kl - 0.05 * entropy.detach())).sum()
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, weights * (policy + 0.3 * d), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(entropy.grad, -0.05 * weights, rtol=1e-6, atol=0)
    parts = sum(metrics[name][0] for name in ("policy_loss", "kl_loss", "entropy_loss"))
    torch.testing.assert_close(parts, metrics["loss"][0])
    assert metrics["num_tokens"][0] == mask.sum()


def test_a_soft_weight_scales_the_kl_and_is_no_mask():
    one = torch.ones(1, 1)
    tensors = {
        "log_probs": one - 2.0,
        "ref_log_probs": one - 1.5,
        "old_log_probs": one - 2.0,
        "advantages": 0 * one,
    }
    objective = Objective(kl_coef=1.0)
    metrics = objective_step(objective, tensors, one.bool(), 0.5 * one)[2]
    assert metrics["kl_loss"][0].item() == pytest.approx(0.074361, abs=1e-6)
    assert metrics["kl"].tolist() == pytest.approx([0.148721, 1.0], abs=1e-6)


def test_weights_at_masked_positions_count_nothing():
    tensors, mask, weights = random_case()
    objective = Objective(lambda log_probs: 1.0 - log_probs)  # 1, not 0, where masked
    want = run(objective, tensors, mask, torch.where(mask, weights, 0.0))
    dirty = run(objective, tensors, mask, torch.where(mask, weights, 3.0))
    assert torch.equal(dirty[0], want[0]) and torch.equal(dirty[1], want[1])


def test_negative_weights_are_weights():
    tensors, mask, weights = random_case()
    got = objective_step(Objective("cross_entropy"), tensors, mask, -weights)
    torch.testing.assert_close(got[1], weights)


def test_auxiliary_terms_are_the_same_for_any_cut():
    tensors, mask, weights = random_case(rows=8)
    objective = Objective(kl_coef=0.2, kl_is_weighted=True, entropy_coef=0.1, entropy_max=1.5)
    whole_entropy = entropies(mask)
    loss, gradient, _ = run(objective, tensors, mask, weights, whole_entropy)
    for size in (1, 2, 4):
        losses, gradients, entropy_gradients = [], [], []
        for i in range(0, 8, size):
            cut = {k: v[i : i + size] for k, v in tensors.items()}
            entropy = entropies(mask).detach()[i : i + size].clone().requires_grad_()
            step = run(objective, cut, mask[i : i + size], weights[i : i + size], entropy)
            losses.append(step[0])
            gradients.append(step[1])
            entropy_gradients.append(entropy.grad)
        torch.testing.assert_close(sum(losses), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(torch.cat(entropy_gradients), whole_entropy.grad)


def test_entropy_above_its_maximum_earns_nothing():
    tensors, mask, weights = random_case()
    entropy = entropies(mask)
    _, _, metrics = run(
        Objective(entropy_coef=1.0, entropy_max=1.0), tensors, mask, weights, entropy
    )
    free = (entropy.detach() <= 1.0) & mask
    torch.testing.assert_close(entropy.grad, torch.where(free, -weights, 0.0), rtol=1e-6, atol=0)
    want = -(weights * entropy.detach().clamp(max=1.0)).sum()
    assert metrics["entropy_loss"][0].item() == pytest.approx(want.item(), rel=1e-6)
    reported = metrics["entropy"]
    assert reported[0].item() == pytest.approx(entropy.detach()[mask].sum().item(), rel=1e-6)


def test_on_policy_needs_no_old_log_probs_and_has_ratio_one():
    tensors, mask, weights = random_case()
    objective = Objective(on_policy=True)
    assert objective.needs == ("advantages",)
    given = {k: tensors[k] for k in ("log_probs", "advantages")}
    _, gradient, metrics = objective_step(objective, given, mask, weights)
    torch.testing.assert_close(gradient, -weights * tensors["advantages"], rtol=1e-6, atol=0)
    assert metrics["ratio_max"].item() == 1.0


def test_masked_nan_in_log_probs_and_entropy_changes_no_bit():
    tensors, mask, weights = random_case(dtype=torch.float32)
    objective = Objective(kl_coef=0.1, entropy_coef=0.1)
    clean_entropy = entropies(mask, torch.float32)
    want = run(objective, tensors, mask, weights, clean_entropy)
    dirty_entropy = torch.where(mask, clean_entropy.detach(), math.nan).requires_grad_()
    dirty = {k: torch.where(mask, v, -math.inf) for k, v in tensors.items()}
    got = run(objective, dirty, mask, weights, dirty_entropy)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(dirty_entropy.grad, clean_entropy.grad)


@pytest.mark.parametrize(
    ("terms", "culprit"),
    [
        ({"kl_coef": 0.1}, "kl_coef=0.1"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1"),
        ({"loss": "dro", "loss_settings": {"beta": 1.0}}, "'dro'"),
        ({"loss": "clip_cov"}, "'clip_cov'"),
        ({"loss": "kl_cov"}, "'kl_cov'"),
    ],
)
def test_terms_that_advantages_cannot_weight_need_explicit_weights(terms, culprit):
    with pytest.raises(InputError, match=f"{culprit} need 'loss_weights'"):
        Objective(**terms).check_weights(False)
    Objective(**terms).check_weights(True)
    Objective().check_weights(False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": -0.1}, "kl_coef must be"),
        ({"kl_coef": math.nan}, "kl_coef must be"),
        ({"entropy_coef": math.inf}, "entropy_coef must be"),
        ({"entropy_max": 0.0}, "entropy_max must be"),
        ({"kl_estimator": "low_var_kl"}, "unknown KL estimator"),
        ({"kl_is_weighted": True, "kl_estimator": "k2"}, "needs the estimator"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Objective(**settings)


def batch(**replaced):
    rows = {
        "tokens": torch.zeros(2, 4, dtype=torch.long),
        "loss_mask": torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool),
        "advantages": torch.ones(2),
        "rollout_log_probs": torch.full((2, 4), -1.0),
    }
    return {**rows, **replaced}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_rollout_log_prob_is_named_if_trained_and_ignored_if_masked(bad):
    masked = torch.full((2, 4), -1.0)
    masked[1, 3] = bad
    make_token_batch(batch(rollout_log_probs=masked))
    trained = masked.clone()
    trained[1, 2] = bad
    with pytest.raises(InputError, match=r"rollout_log_probs is .* at row 1, position 2"):
        make_token_batch(batch(rollout_log_probs=trained))


def test_missing_tensors_are_named():
    with pytest.raises(InputError, match="lacks 'old_log_probs', 'ref_log_probs'"):
        make_token_batch(batch(), needs=Objective(kl_coef=0.1).needs)


def test_a_kl_with_old_log_probs_only_for_its_weight_names_them():
    objective = Objective("policy_gradient", kl_coef=0.1, kl_is_weighted=True)
    assert objective.needs == ("advantages", "ref_log_probs", "old_log_probs")


@pytest.mark.parametrize("value", ["tis", 3, [("is_level", "token")]])
def test_an_off_policy_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match="off_policy must be an OffPolicy, a dict"):
        Objective(off_policy=value)


@pytest.mark.parametrize("name", ["kl_coef", "entropy_coef", "entropy_max"])
def test_coefficients_are_numbers(name):
    with pytest.raises(ConfigError, match=f"{name} must be a number, got '0.1'"):
        Objective(**{name: "0.1"})


@pytest.mark.parametrize(
    ("settings", "left_out", "missing"),
    [
        ({}, "old_log_probs", "old_log_probs"),
        ({"kl_coef": 0.1}, "ref_log_probs", "ref_log_probs"),
        ({"entropy_coef": 0.1}, None, "entropy"),
    ],
)
def test_a_term_whose_tensor_is_missing_is_an_error_not_a_silent_zero(settings, left_out, missing):
    tensors, mask, weights = random_case()
    given = {name: value for name, value in tensors.items() if name != left_out}
    with pytest.raises(InputError, match=f"needs {missing}"):
        run(Objective(**settings), given, mask, weights)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
def test_weights_are_never_broadcast(shape):
    given = {"advantages": torch.ones(3, 3), "log_probs": torch.zeros(3, 3)}
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="loss_weights has shape"):
        run(Objective("policy_gradient"), given, mask, torch.ones(shape))
