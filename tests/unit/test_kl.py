from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.ops.coefficients import AdaptiveEntropyCoef, AdaptiveKLCoef
from megatron_rl_loss.ops.kl import (
    KL_ESTIMATORS,
    is_weighted_kl,
    kl_estimator,
    kl_penalty,
    kl_shaped_rewards,
)

# value and derivative at d = 0.5 and d = -1
TABLE = {
    "k1": ((0.5, 1.0), (-1.0, 1.0)),
    "k2": ((0.125, 0.5), (0.5, -1.0)),
    "k3": ((0.10653066, 0.39346934), (math.e - 2, 1 - math.e)),
    "abs": ((0.5, 1.0), (1.0, -1.0)),
    "k1+": ((0.5, 0.5), (-1.0, -1.0)),
    "k3+": ((0.10653066, 0.5), (math.e - 2, -1.0)),
}


def at(estimator, d, dtype=torch.float64):
    d = torch.tensor([d], dtype=dtype, requires_grad=True)
    value = kl_estimator(estimator)(d)
    value.sum().backward()
    return value.item(), d.grad.item()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_value_and_gradient(estimator):
    for d, want in zip((0.5, -1.0), TABLE[estimator], strict=True):
        assert at(estimator, d) == pytest.approx(want, abs=1e-8)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("d", [-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
def test_every_estimator_is_finite_at_any_distance_in_fp32(estimator, d):
    value, gradient = at(estimator, d, torch.float32)
    assert math.isfinite(value) and math.isfinite(gradient)


def test_k3_far_below_the_reference_still_pulls_back():
    value, gradient = at("k3", -100.0, torch.float32)
    assert value > 0 and gradient < -1e8


def test_k3_is_smooth_where_its_tangent_begins():
    values = [at("k3", -20.0 + x)[0] for x in (-1e-4, 0.0, 1e-4)]
    left, right = values[0] - values[1], values[1] - values[2]
    assert left == pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k3+"])
def test_non_negative_estimators(estimator):
    d = torch.linspace(-5, 5, 101)
    assert (kl_estimator(estimator)(d) >= 0).all()


def test_equal_policies_have_exactly_zero_kl():
    log_probs = torch.randn(50)
    for estimator in KL_ESTIMATORS:
        assert not kl_penalty(log_probs, log_probs.clone(), estimator).any()


def three_policies():
    theta, old, ref = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    return theta.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)


def exact_gradient(theta, ref, reverse=True):
    log_p = theta.log_softmax(0)
    kl = (log_p.exp() * (log_p - ref)).sum() if reverse else (ref.exp() * (ref - log_p)).sum()
    return torch.autograd.grad(kl, theta)[0]


def expected_gradient(theta, probabilities, per_action):
    total = (probabilities.detach() * per_action).sum()
    return torch.autograd.grad(total, theta, retain_graph=True)[0]


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_on_policy_gradient_is_that_of_the_reverse_kl(estimator):
    theta, _, ref = three_policies()
    log_p = theta.log_softmax(0)
    got = expected_gradient(theta, log_p.exp(), kl_penalty(log_p, ref, estimator))
    torch.testing.assert_close(got, exact_gradient(theta, ref))


def test_on_policy_gradient_of_k3_is_that_of_the_forward_kl_and_of_k1_is_zero():
    theta, _, ref = three_policies()
    log_p = theta.log_softmax(0)
    k3 = expected_gradient(theta, log_p.exp(), kl_penalty(log_p, ref, "k3"))
    torch.testing.assert_close(k3, exact_gradient(theta, ref, reverse=False))
    k1 = expected_gradient(theta, log_p.exp(), kl_penalty(log_p, ref, "k1"))
    assert k1.abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_kl_has_value_and_gradient_of_the_kl_off_policy(estimator):
    theta, old, ref = three_policies()
    log_p = theta.log_softmax(0)
    per_action = is_weighted_kl(log_p, old, ref, estimator)
    kl = (log_p.exp() * (log_p - ref)).sum()
    assert (old.exp() * per_action).sum().item() == pytest.approx(kl.item())
    got = expected_gradient(theta, old.exp(), per_action)
    torch.testing.assert_close(got, exact_gradient(theta, ref))


def test_unknown_and_unfit_estimators_are_refused():
    with pytest.raises(ConfigError, match="known: k1, k2, k3"):
        kl_estimator("low_var")
    with pytest.raises(ConfigError, match="needs the estimator k1 or k3"):
        is_weighted_kl(torch.zeros(1), torch.zeros(1), torch.zeros(1), "k2")


def test_no_gradient_goes_to_the_reference():
    log_probs, ref = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    kl_penalty(log_probs, ref).sum().backward()
    assert ref.grad is None and log_probs.grad is not None


def test_kl_in_rewards_puts_the_reward_on_the_last_trained_token():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    kl = torch.where(mask, torch.arange(6.0).expand(2, 6), math.nan)
    got = kl_shaped_rewards(torch.tensor([10.0, 7.0]), kl, mask, kl_coef=0.1)
    want = torch.tensor([[0, -0.1, -0.2, 0, 10 - 0.4, 0], [0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("rewards", "kl"), [((1,), (3, 3)), ((3, 3), (3, 3)), ((3,), (3,))])
def test_kl_in_rewards_broadcasts_nothing(rewards, kl):
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="has shape"):
        kl_shaped_rewards(torch.ones(rewards), torch.zeros(kl), mask, kl_coef=0.1)


def test_adaptive_kl_coefficient_moves_towards_the_target():
    coef = AdaptiveKLCoef(0.1, target=1.0, horizon=100)
    assert coef.update(1.0, num_sequences=10) == pytest.approx(0.1)
    assert coef.update(5.0, num_sequences=10) == pytest.approx(0.1 * 1.02)  # error clipped to 0.2
    assert coef.update(0.9, num_sequences=10) == pytest.approx(0.1 * 1.02 * 0.99)
    huge = AdaptiveKLCoef(0.1, target=1.0, horizon=100)
    assert huge.update(0.0, num_sequences=10_000) == pytest.approx(0.08)  # never negative
    with pytest.raises(ConfigError, match="target"):
        AdaptiveKLCoef(0.1, target=0.0, horizon=100)


def test_adaptive_entropy_coefficient_acts_only_below_its_target():
    coef = AdaptiveEntropyCoef(0.0, target=0.5, step=0.01, coef_max=0.02)
    assert [coef.update(h) for h in (0.4, 0.4, 0.4, 0.6, 0.4)] == pytest.approx(
        [0.01, 0.02, 0.02, 0.0, 0.02]
    )
    with pytest.raises(ConfigError, match="coef_max"):
        AdaptiveEntropyCoef(0.5, target=0.5, step=0.01, coef_max=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_adaptive_coefficients_refuse_non_finite_input(value):
    with pytest.raises(ConfigError, match="finite"):
        AdaptiveKLCoef(0.1, target=1.0, horizon=100).update(value, num_sequences=1)
    with pytest.raises(ConfigError, match="finite"):
        AdaptiveEntropyCoef(0.0, target=0.5).update(value)
