"""Every loss of the registry: the reference, gradients, masks, weights, settings."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.losses.registry import LOSSES, check_settings, loss_spec
from megatron_rl_loss.ops.sequences import Sequences
from tests.reference import losses as reference
from tests.unit.loss_cases import (
    LABEL_LOSSES,
    LOSSES_WITH_SETTINGS,
    as_sequences,
    call_loss,
    random_case,
)

# their value is not the integral of their gradient: parts of it are constants
STOP_GRADIENT = {"cispo", "tinker_cispo", "topr", "gspo_token"}
each_loss = pytest.mark.parametrize(
    ("name", "settings"),
    [case for case in LOSSES_WITH_SETTINGS if case[0] in LABEL_LOSSES],
    ids=lambda x: x if isinstance(x, str) else "",
)


def value_and_gradient(name, settings, tensors, loss_mask, weights):
    log_probs = tensors["log_probs"].clone().requires_grad_()
    result = call_loss(name, settings, {**tensors, "log_probs": log_probs}, loss_mask)
    (weights * result.loss).sum().backward()
    return result.loss.detach(), log_probs.grad


def objective_step(objective, tensors, loss_mask, weights, **kwargs):
    log_probs = tensors["log_probs"].clone().requires_grad_()
    others = {name: value for name, value in tensors.items() if name != "log_probs"}
    loss, metrics = objective(log_probs, None, others, loss_mask, weights, **kwargs)
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


@each_loss
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_equal_the_reference(name, settings, seed):
    tensors, loss_mask, weights = random_case(seed=seed)
    loss, gradient = value_and_gradient(name, settings, tensors, loss_mask, weights)
    want_loss, want_gradient = getattr(reference, name)(
        as_sequences(tensors, loss_mask, weights), **settings
    )
    for row, (losses, gradients) in enumerate(zip(want_loss, want_gradient, strict=True)):
        at = loss_mask[row]
        assert loss[row, at].tolist() == pytest.approx(losses, abs=1e-12, rel=1e-12)
        assert gradient[row, at].tolist() == pytest.approx(gradients, abs=1e-12, rel=1e-12)
    assert not gradient[~loss_mask].any()


@each_loss
def test_gradcheck(name, settings):
    if name in STOP_GRADIENT:
        pytest.skip("the loss has constants that depend on log_probs")
    tensors, loss_mask, weights = random_case(rows=3, length=4, seed=3)

    def weighted(log_probs):
        log_probs = torch.where(loss_mask, log_probs, 0.0)
        result = call_loss(name, settings, {**tensors, "log_probs": log_probs}, loss_mask)
        return result.loss * weights

    assert torch.autograd.gradcheck(weighted, (tensors["log_probs"].requires_grad_(),))


@each_loss
def test_fp32_is_close_to_fp64(name, settings):
    tensors, loss_mask, weights = random_case()
    want = value_and_gradient(name, settings, tensors, loss_mask, weights)
    single = {k: v.float() for k, v in tensors.items()}
    got = value_and_gradient(name, settings, single, loss_mask, weights.float())
    for a, b in zip(got, want, strict=True):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@each_loss
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 200.0])
def test_masked_positions_change_no_bit(name, settings, garbage):
    objective = Objective(name, settings)
    tensors, loss_mask, weights = random_case(dtype=torch.float32)
    want = objective_step(objective, tensors, loss_mask, weights)
    dirty = {k: torch.where(loss_mask, v, garbage) for k, v in tensors.items()}
    got = objective_step(objective, dirty, loss_mask, torch.where(loss_mask, weights, garbage))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert set(got[2]) == set(want[2])
    assert all(torch.equal(got[2][key], want[2][key]) for key in want[2])


@each_loss
def test_a_batch_without_trained_tokens_gives_zero(name, settings):
    tensors, loss_mask, weights = random_case(dtype=torch.float32)
    nothing = torch.zeros_like(loss_mask)
    loss, gradient, metrics = objective_step(Objective(name, settings), tensors, nothing, weights)
    assert loss == 0 and torch.equal(gradient, torch.zeros_like(gradient))
    keys = objective_step(Objective(name, settings), tensors, loss_mask, weights)[2].keys()
    assert metrics.keys() == keys


@each_loss
def test_weights_may_move_into_the_advantages_only_if_homogeneous(name, settings):
    if name == "clip_cov" and not settings:
        pytest.skip("the defaults choose none of so few tokens")
    tensors, loss_mask, weights = random_case()
    ones = loss_mask.double()
    want = value_and_gradient(name, settings, tensors, loss_mask, weights)
    scaled = {**tensors, "advantages": tensors["advantages"] * weights}
    got = value_and_gradient(name, settings, scaled, loss_mask, ones)
    same = torch.allclose((want[0] * weights)[loss_mask], got[0][loss_mask], rtol=1e-12)
    same = same and torch.allclose(want[1], got[1], rtol=1e-12)
    assert same == LOSSES[name].homogeneous


@each_loss
def test_the_gradient_does_not_depend_on_the_cut_unless_marked(name, settings):
    objective = Objective(name, settings)
    tensors, loss_mask, weights = random_case(rows=6)
    _, whole, _ = objective_step(objective, tensors, loss_mask, weights)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        cut = {k: v[rows] for k, v in tensors.items()}
        parts.append(objective_step(objective, cut, loss_mask[rows], weights[rows])[1])
    same = torch.allclose(torch.cat(parts), whole, rtol=1e-5, atol=1e-7)
    if LOSSES[name].depends_on_micro_batch:
        if settings:  # the defaults choose too few of 42 tokens to tell
            assert not same
    else:
        assert same


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_stats_are_constants_per_token(name):
    settings = dict(LOSSES_WITH_SETTINGS)[name]
    tensors, loss_mask, _ = random_case()
    tensors["log_probs"].requires_grad_()
    result = call_loss(name, settings, tensors, loss_mask)
    assert result.loss.requires_grad
    for stat in result.stats.values():
        assert stat.shape == loss_mask.shape and not stat.requires_grad


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_nan_at_a_trained_position_stays_visible(name):
    settings = dict(LOSSES_WITH_SETTINGS)[name]
    tensors, loss_mask, weights = random_case(dtype=torch.float32)
    row, position = loss_mask.nonzero()[4]
    tensors["log_probs"][row, position] = math.nan
    loss, _, _ = objective_step(Objective(name, settings), tensors, loss_mask, weights)
    assert loss.isnan()


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("name", [n for n in LABEL_LOSSES if "dro" not in n])
def test_extreme_ratios_stay_finite(name, gap, advantage):
    settings = dict(LOSSES_WITH_SETTINGS)[name]
    old = torch.full((1, 2), -1.0 if gap < 0 else -1.0 - gap)
    tensors = {
        "log_probs": old + gap,
        "old_log_probs": old,
        "rollout_log_probs": old,
        "teacher_log_probs": old - 1,
        "advantages": torch.full((1, 2), advantage),
    }
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, gradient = value_and_gradient(name, settings, tensors, mask, mask.float())
    assert loss.isfinite().all() and gradient.isfinite().all()


def one(fn, log_ratio, advantage, **settings):
    """Loss, gradient and stats of one token with old log-prob 0."""
    log_probs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    result = fn(log_probs, torch.zeros(1), torch.tensor([advantage]), **settings)
    result.loss.sum().backward()
    return result.loss.item(), log_probs.grad.item(), result.stats


ppo_clip, dual_clip = LOSSES["ppo_clip"].fn, LOSSES["dual_clip"].fn


@pytest.mark.parametrize(
    ("advantage", "r", "loss", "gradient", "clipped"),
    [
        (1, 1.5, -1.2, 0, 1),
        (1, 0.5, -0.5, -0.5, 0),
        (-1, 0.5, 0.8, 0, 1),
        (-1, 1.5, 1.5, 1.5, 0),
        (0, 1.5, 0, 0, 0),
        (1, 1.0, -1, -1, 0),
    ],
)
def test_clip_table(advantage, r, loss, gradient, clipped):
    got = one(ppo_clip, math.log(r), advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-9)
    assert got[2]["clip_fraction"].item() == clipped


@pytest.mark.parametrize(("advantage", "loss"), [(0, 0), (1, -1.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_ratio_of_100_is_clipped_without_overflow(advantage, loss, dtype):
    log_probs = torch.tensor([100.0], dtype=dtype, requires_grad=True)
    result = ppo_clip(log_probs, torch.zeros(1), torch.tensor([float(advantage)])).loss
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert log_probs.grad.item() == 0


@pytest.mark.parametrize(
    ("advantage", "r", "loss", "gradient", "bound"),
    [(1, 1.1, -1.1, -1.1, 0), (-1, 10, 3, 0, 1), (-1, 2.5, 2.5, 2.5, 0), (1, 10, -1.2, 0, 0)],
)
def test_dual_clip_bounds_only_negative_advantages(advantage, r, loss, gradient, bound):
    got = one(dual_clip, math.log(r), advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-9)
    assert got[2]["dual_clip_fraction"].item() == bound


def test_low_equal_high_zero_is_the_policy_gradient_on_policy():
    got = one(partial(ppo_clip, clip_ratio_low=0.0, clip_ratio_high=0.0), 0.0, 2.0)
    assert got[:2] == (-2.0, -2.0)


def test_masked_tokens_never_count_as_clipped():
    tensors = {
        "log_probs": torch.tensor([[1.0, 1.0, 0.0, 0.0]]).mul(math.log(1.5)),
        "old_log_probs": torch.zeros(1, 4),
        "advantages": torch.ones(1, 4),
    }
    mask = torch.tensor([[True, False, True, False]])
    _, _, metrics = objective_step(Objective(), tensors, mask, mask.float())
    assert metrics["clip_fraction"].tolist() == [1.0, 2.0]


def test_importance_sampling_as_tinker_documents_it():
    args = torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([2.0])
    for name in ("importance_sampling", "tinker_importance_sampling"):
        assert LOSSES[name].fn(*args).loss.item() == pytest.approx(-3.297443, abs=1e-6)


def test_on_policy_losses_have_the_gradient_of_reinforce():
    tensors, loss_mask, weights = random_case()
    row_advantages = torch.randn(5, 1).double().expand_as(loss_mask) * loss_mask
    tensors["advantages"] = row_advantages
    for name in ("old_log_probs", "rollout_log_probs"):
        tensors[name] = tensors["log_probs"]
    weights = loss_mask.double() / loss_mask.sum(1, keepdim=True).clamp(min=1)
    want = value_and_gradient("policy_gradient", {}, tensors, loss_mask, weights)[1]
    others = set(LABEL_LOSSES) - {"cross_entropy", "on_policy_distillation", "clip_cov", "kl_cov"}
    for name in others:
        settings = dict(LOSSES_WITH_SETTINGS)[name]
        got = value_and_gradient(name, settings, tensors, loss_mask, weights)[1]
        torch.testing.assert_close(got, want, msg=name)


def test_tinker_thresholds_are_absolute():
    tensors, loss_mask, _ = random_case()
    tensors["old_log_probs"] = tensors["rollout_log_probs"]
    a = call_loss("tinker_ppo", {}, tensors, loss_mask)
    b = call_loss("ppo_clip", {}, tensors, loss_mask)
    torch.testing.assert_close(a.loss, b.loss)
    assert torch.equal(a.stats["clip_fraction"], b.stats["clip_fraction"])


BAD_SETTINGS = [
    ("ppo_clip", {"clip_ratio_low": 0.8}, "offset from 1"),
    ("ppo_clip", {"clip_ratio_high": 1.2}, "offset from 1"),
    ("ppo_clip", {"clip_ratio_low": -0.1}, "clip_ratio_low"),
    ("ppo_clip", {"clip_ratio_high": math.nan}, "clip_ratio_high"),
    ("dual_clip", {"dual_clip_ratio": 1.0}, "must be > 1"),
    ("dual_clip", {"dual_clip_ratio": math.nan}, "must be > 1"),
    ("gspo", {"clip_ratio_low": 0.9997}, "offset from 1"),
    ("gmpo", {"log_clip_low": -0.4}, "log_clip_low"),
    ("topr", {"truncate_positive": 0.0}, "truncate_positive"),
    ("cispo", {"clip_ratio_low": 1.5}, "they are offsets from 1"),
    ("sapo", {"tau_positive": 0.0}, "tau_positive"),
    ("dro", {}, "needs the setting 'beta'"),
    ("dro", {"beta": -1.0}, "beta must be"),
    ("dppo_tv", {"divergence_max": 2.0}, "divergence_max"),
    ("dppo_kl", {"divergence_max": 0.0}, "divergence_max"),
    ("clip_cov", {"cov_fraction": 0.0}, "cov_fraction"),
    ("clip_cov", {"cov_min": 5.0, "cov_max": 1.0}, "cov_min must be below"),
    ("kl_cov", {"cov_kl_coef": -1.0}, "cov_kl_coef"),
    ("tinker_ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "absolute ratios"),
    ("tinker_cispo", {"clip_high_threshold": 0.5}, "absolute ratios"),
    ("ppo_clip", {"eps_clip": 0.2}, "has no setting 'eps_clip'"),
]


@pytest.mark.parametrize(("name", "settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused_when_the_objective_is_made(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        Objective(name, settings)


def test_unknown_losses_are_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="ppo_clip, dual_clip"):
        loss_spec("ppo")
    with pytest.raises(ConfigError, match="cannot import"):
        loss_spec("no_such_package.losses:fn")
    with pytest.raises(ConfigError, match="cannot import"):
        loss_spec("math:no_such_name")
    with pytest.raises(ConfigError, match="not a function"):
        loss_spec("math:pi")


def test_a_loss_that_asks_for_an_unknown_tensor_is_refused():
    def loss(log_probs, old_logprobs):
        return log_probs

    with pytest.raises(ConfigError, match="'old_logprobs'"):
        check_settings(loss_spec(loss), {})


def my_loss(log_probs, advantages, *, scale=1.0):
    return -scale * log_probs * advantages


def test_a_loss_by_import_path_equals_the_function():
    tensors, loss_mask, weights = random_case()
    by_path = Objective("tests.unit.test_losses:my_loss", {"scale": 2.0})
    by_function = Objective(my_loss, {"scale": 2.0})
    a = objective_step(by_path, tensors, loss_mask, weights)
    b = objective_step(by_function, tensors, loss_mask, weights)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not by_path.homogeneous


def test_a_loss_that_takes_a_mean_is_refused_when_the_objective_is_made():
    with pytest.raises(ConfigError, match="must not take a mean"):
        Objective(lambda log_probs: -log_probs.mean())
    with pytest.raises(ConfigError, match="must not take a mean"):
        Objective(lambda log_probs: -log_probs.sum(1))


def test_a_loss_that_breaks_is_refused_when_the_objective_is_made():
    def broken(log_probs):
        raise KeyError("nope")

    with pytest.raises(ConfigError, match="KeyError"):
        Objective(broken)


@pytest.mark.parametrize("name", ["old_log_probs", "advantages"])
def test_as_many_rows_as_positions_never_broadcast(name):
    tensors, loss_mask, weights = random_case(rows=4, length=4)
    tensors[name] = tensors[name][:, 0]
    with pytest.raises(InputError, match=f"{name} has shape"):
        objective_step(Objective(), tensors, loss_mask, weights)


def test_gspo_ratio_is_the_geometric_mean():
    for log_ratios, s in (([0.5, -0.5], 1.0), ([0.2, 0.4, 0.6], 1.491825)):
        log_probs = torch.tensor([log_ratios])
        mask = torch.ones_like(log_probs, dtype=torch.bool)
        for name in ("gspo", "gspo_token"):
            result = LOSSES[name].fn(
                log_probs, torch.zeros_like(log_probs), torch.ones_like(log_probs), Sequences(mask)
            )
            assert result.stats["ratio_mean"][0].tolist() == pytest.approx([s] * len(log_ratios))
            assert result.stats["clip_fraction"].any() == (s > 1)


def test_gspo_keeps_sequences_apart_with_as_many_rows_as_positions():
    tensors, _, _ = random_case(rows=3, length=3)
    mask = torch.ones(3, 3, dtype=torch.bool)
    tensors["log_probs"] = tensors["old_log_probs"] + torch.tensor([[0.1], [0.2], [0.3]])
    ratios = call_loss("gspo", {}, tensors, mask).stats["ratio_mean"]
    want = torch.tensor([0.1, 0.2, 0.3]).exp().double()[:, None].expand(3, 3)
    torch.testing.assert_close(ratios, want, rtol=1e-6, atol=0)


def test_cov_losses_choose_by_raw_advantages_for_every_reduction():
    tensors, loss_mask, weights = random_case()
    settings = {"cov_fraction": 0.3, "cov_min": -0.1, "cov_max": 0.4}
    chosen = []
    for scale in (1.0, 1e-4):
        _, _, metrics = objective_step(
            Objective("clip_cov", settings), tensors, loss_mask, weights * scale
        )
        chosen.append(metrics["cov_fraction"].tolist())
    assert chosen[0] == chosen[1] and chosen[0][0] > 0


def test_cov_kl_keeps_its_share_of_the_loss_for_every_weight_scale():
    tensors, loss_mask, weights = random_case()
    objective = Objective("kl_cov", {"cov_fraction": 0.25})
    a = objective_step(objective, tensors, loss_mask, weights)[1]
    b = objective_step(objective, tensors, loss_mask, weights / 1024)[1]
    torch.testing.assert_close(a, b * 1024)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_clip_cov_takes_exactly_its_share_of_the_candidates(count):
    tensors, _, _ = random_case(rows=4, length=5)
    mask = torch.ones(4, 5, dtype=torch.bool)
    tensors["old_log_probs"] = tensors["log_probs"]
    settings = {"cov_fraction": count / 20, "cov_min": -99.0, "cov_max": 99.0}
    result = call_loss("clip_cov", settings, tensors, mask)
    assert result.stats["cov_fraction"].sum() == count
