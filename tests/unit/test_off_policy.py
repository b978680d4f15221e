from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.losses.off_policy import OffPolicy, correction, kept_tokens
from megatron_rl_loss.ops.masks import finite_mask
from megatron_rl_loss.ops.sequences import Sequences
from tests.unit.loss_cases import random_case
from tests.unit.test_losses import objective_step

T, F = True, False
# log(old / rollout) of two sequences; the third position of the second one is masked
LOG_RHO = torch.tensor([[0.9, -0.3, 0.3], [-2.0, 0.5, math.nan]])
MASK = torch.tensor([[T, T, T], [T, T, F]])


def tensors(log_rho=LOG_RHO, mask=MASK):
    rollout = torch.full_like(log_rho, -1.0)
    clean = torch.where(mask, log_rho, 0.0)
    return {
        "old_log_probs": rollout + clean,
        "rollout_log_probs": rollout,
        "log_probs": rollout + clean,
    }


def factors(**settings):
    return correction(OffPolicy(**settings), tensors(), Sequences(MASK))


def ratios(level):
    """The ratio of each trained token at the level, in Python floats."""
    rows = [[0.9, -0.3, 0.3], [-2.0, 0.5]]
    logs = {
        "token": rows,
        "sequence": [[sum(r)] * len(r) for r in rows],
        "geometric": [[sum(r) / len(r)] * len(r) for r in rows],
    }[level]
    return [math.exp(x) for row in logs for x in row]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bounds", [(0.0, 1e9), (0.0, 2.0), (0.5, 1.4)])
def test_truncated_weights(level, bounds):
    factor, stats = factors(is_level=level, is_min=bounds[0], is_max=bounds[1])
    want = [min(max(r, bounds[0]), bounds[1]) for r in ratios(level)]
    assert factor[MASK].tolist() == pytest.approx(want)
    outside = [float(not bounds[0] <= r <= bounds[1]) for r in ratios(level)]
    assert stats["is_outside_fraction"][MASK].tolist() == outside


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_weights_outside_the_band_are_zero_inside_unchanged(level):
    factor, _ = factors(is_level=level, is_min=0.7, is_max=1.4, is_outside="mask")
    want = [r if 0.7 <= r <= 1.4 else 0.0 for r in ratios(level)]
    assert factor[MASK].tolist() == pytest.approx(want)
    assert 0 in factor[MASK]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_rejected_tokens_get_factor_zero_and_others_one(level):
    factor, stats = factors(reject_level=level, reject_min=0.7, reject_max=1.5)
    want = [float(0.7 <= r <= 1.5) for r in ratios(level)]
    assert factor[MASK].tolist() == want
    assert stats["rejected_fraction"][MASK].tolist() == [1 - x for x in want]


def test_one_outlier_token_rejects_its_whole_sequence():
    factor, _ = factors(reject_level="any_token", reject_min=0.2, reject_max=100.0)
    assert factor[MASK].tolist() == [1, 1, 1, 0, 0]


def test_weight_and_rejection_combine():
    factor, _ = factors(is_level="token", is_max=2.0, reject_level="any_token", reject_min=0.2)
    assert factor[MASK].tolist() == pytest.approx([0, 0, 0, 0, 0])  # exp(0.9) is above 2 as well
    factor, _ = factors(is_level="token", reject_level="any_token", reject_min=0.2, reject_max=9.0)
    assert factor[MASK].tolist() == pytest.approx([2.0, math.exp(-0.3), math.exp(0.3), 0, 0])


def test_negative_sequences_that_the_policy_has_left_are_rejected():
    off_policy = OffPolicy(negative_max_kl=0.1)
    given = tensors()
    given["log_probs"] = given["rollout_log_probs"] - torch.tensor([[0.3, 0.1, -0.1], [0.3, 0, 9]])
    given["advantages"] = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 1.0, 0.0]])
    factor, _ = correction(off_policy, given, Sequences(MASK))
    # mean gaps: (0.3 + 0.1 - 0.1) / 3 = 0.1, not above (within rounding), and 0.3 / 2 = 0.15
    assert factor[1].tolist()[:2] == [0.0, 1.0]
    given["advantages"] = given["advantages"].abs()
    assert correction(off_policy, given, Sequences(MASK))[0].eq(1).all()


def test_effective_share_of_tokens_comes_from_the_two_means():
    _, stats = factors(is_level="token")
    weights = [min(r, 2.0) for r in ratios("token")]
    mean = stats["is_weight_mean"][MASK].mean().item()
    square = stats["is_weight_sq_mean"][MASK].mean().item()
    want = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert mean**2 / square == pytest.approx(want)


@pytest.mark.parametrize("is_level", [None, "token", "sequence"])
def test_kept_tokens_are_those_with_a_factor(is_level):
    settings = {"is_level": is_level, "is_min": 0.3, "is_outside": "mask"}
    off_policy = OffPolicy(**settings, reject_level="token", reject_min=0.3, reject_max=2.4)
    given = tensors()
    dirty = {k: torch.where(MASK, v, math.nan) for k, v in given.items()}
    kept = kept_tokens(off_policy, MASK, dirty["old_log_probs"], dirty["rollout_log_probs"])
    assert torch.equal(kept, MASK & (correction(off_policy, given, Sequences(MASK))[0] > 0))
    assert kept.sum() < MASK.sum()


def test_kept_tokens_refuse_what_depends_on_the_current_policy():
    with pytest.raises(ConfigError, match="negative_max_kl"):
        kept_tokens(OffPolicy(negative_max_kl=0.1), MASK, LOG_RHO, LOG_RHO)


def test_decoupled_ppo_is_the_behaviour_weight_times_the_clipped_loss():
    given, mask, weights = random_case()
    plain = Objective("ppo_clip")
    decoupled = Objective("ppo_clip", off_policy={"is_level": "token", "is_max": 1e9})
    rho = (given["old_log_probs"] - given["rollout_log_probs"]).exp()
    want = objective_step(plain, given, mask, weights * rho)
    got = objective_step(decoupled, given, mask, weights)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_kl_and_entropy_terms_are_not_corrected():
    given, mask, weights = random_case()
    off_policy = {"reject_level": "token", "reject_min": 0.0, "reject_max": 1e-12}
    objective = Objective("ppo_clip", kl_coef=0.1, off_policy=off_policy)
    loss, _, metrics = objective_step(objective, given, mask, weights)
    kl = objective_step(Objective("ppo_clip", kl_coef=0.1), given, mask, weights)[2]["kl_loss"]
    assert metrics["policy_loss"][0] == 0
    torch.testing.assert_close(metrics["kl_loss"], kl)
    assert loss == metrics["kl_loss"][0]


@pytest.mark.parametrize(
    "off_policy",
    [
        {"is_level": "token", "is_outside": "mask"},
        {"is_level": "sequence"},
        {"is_level": "geometric", "reject_level": "geometric"},
        {"reject_level": "any_token"},
        {"negative_max_kl": 0.05},
        {"is_level": "given"},
    ],
)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 200.0])
def test_masked_positions_change_no_bit(off_policy, garbage):
    objective = Objective("ppo_clip", off_policy=off_policy)
    given, mask, weights = random_case(dtype=torch.float32)
    if off_policy.get("is_level") == "given":
        given["rollout_is_weights"] = torch.rand(mask.shape)
    want = objective_step(objective, given, mask, weights)
    dirty = {k: torch.where(mask, v, garbage) for k, v in given.items()}
    got = objective_step(objective, dirty, mask, weights)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert all(torch.equal(got[2][key], want[2][key]) for key in want[2])


def test_given_weights_multiply_the_loss():
    given, mask, weights = random_case()
    rho = 5.0 * torch.randn(mask.shape).double()  # self-normalised ones may be large, or negative
    off_policy = {"is_level": "given"}
    got = objective_step(
        Objective(off_policy=off_policy), given | {"rollout_is_weights": rho}, mask, weights
    )
    want = objective_step(Objective(), given, mask, weights * rho)
    torch.testing.assert_close(got[1], want[1])


def test_given_weights_that_nothing_reads_are_refused():
    given, mask, weights = random_case()
    with pytest.raises(InputError, match="is_level': 'given'"):
        objective_step(Objective(), given | {"rollout_is_weights": weights}, mask, weights)


def test_a_nan_rollout_log_prob_at_a_trained_position_stays_visible():
    given, mask, weights = random_case(dtype=torch.float32)
    row, position = mask.nonzero()[0]
    given["rollout_log_probs"][row, position] = math.nan
    for off_policy in ({"is_level": "token"}, {"is_level": "token", "is_outside": "mask"}):
        assert objective_step(Objective(off_policy=off_policy), given, mask, weights)[0].isnan()


def test_tokens_that_are_not_finite_can_be_dropped_from_loss_and_counts():
    mask = torch.tensor([[T, T, T, F], [T, F, T, T]])
    rollout = torch.zeros(2, 4)
    rollout[0, 1], rollout[1, 1], rollout[1, 2] = math.nan, math.inf, -math.inf
    assert finite_mask(mask, rollout).tolist() == [[T, F, T, F], [T, F, F, T]]
    assert finite_mask(mask, rollout, torch.tensor([0.0, math.nan])).tolist() == [
        [T, F, T, F],
        [F, F, F, F],
    ]


def test_mismatch_is_reported_as_kl_from_rollout_to_old():
    given, mask, weights = random_case()
    metrics = objective_step(Objective(), given, mask, weights)[2]
    x = (given["old_log_probs"] - given["rollout_log_probs"])[mask]
    assert metrics["mismatch_k1"][0].item() == pytest.approx(-x.sum().item(), rel=1e-5)
    want = (x.exp() - 1 - x).sum().item()
    assert metrics["mismatch_k3"][0].item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs is_level, reject_level"),
        ({"is_level": "word"}, "is_level must be one of"),
        ({"is_level": "token", "is_outside": "drop"}, "is_outside must be one of"),
        ({"reject_level": "given"}, "reject_level must be one of"),
        ({"is_level": "given", "is_max": 9.0}, "multiplied in as they are"),
        ({"is_level": "token", "is_max": "2"}, "0 <= min < max, got 0.0 and '2'"),
        ({"is_level": "token", "is_min": 2.0, "is_max": 0.5}, "0 <= min < max"),
        ({"reject_level": "token", "reject_min": -0.1}, "0 <= min < max"),
        ({"is_level": "token", "is_max": math.nan}, "0 <= min < max"),
        ({"negative_max_kl": -1.0}, "negative_max_kl"),
        ({"level": "token"}, "unknown settings \\['level'\\]"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Objective(off_policy=settings)


def test_needs_name_the_tensors_of_the_correction():
    assert Objective(off_policy={"is_level": "token"}).needs == (
        "old_log_probs",
        "advantages",
        "rollout_log_probs",
    )
    on_policy = Objective(on_policy=True, off_policy={"is_level": "token"})
    assert on_policy.needs == ("advantages", "rollout_log_probs")
