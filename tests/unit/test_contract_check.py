from __future__ import annotations

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.contract_check import check_loss
from megatron_rl_loss.losses.registry import LOSSES
from megatron_rl_loss.types import TokenLoss
from tests.unit.loss_cases import LOSSES_WITH_SETTINGS


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_the_registry_keeps_the_contract(name):
    settings = [s for n, s in LOSSES_WITH_SETTINGS if n == name][-1]
    report = check_loss(name, **settings)
    assert report.homogeneous == LOSSES[name].homogeneous
    assert report.depends_on_micro_batch == LOSSES[name].depends_on_micro_batch


def good(log_probs, old_log_probs, advantages, loss_mask, *, power=1.0):
    r = (log_probs - old_log_probs).exp()
    return TokenLoss(-(r**power) * advantages, {"ratio": r.detach()})


def test_a_good_loss_gets_a_report():
    report = check_loss(good, power=0.5)
    assert report.needs == ("log_probs", "old_log_probs", "advantages", "loss_mask")
    assert report.homogeneous and not report.depends_on_micro_batch


def no_gradient(log_probs, advantages):
    return -log_probs.detach() * advantages


def infinite_gradient(log_probs, advantages):
    return -(log_probs - log_probs.detach()).sqrt() * advantages


def unmasked_mean(log_probs, advantages):
    return -log_probs * (advantages - advantages.mean(dim=1, keepdim=True))


def stat_with_gradient(log_probs, advantages):
    return TokenLoss(-log_probs * advantages, {"x": log_probs})


def stat_already_reduced(log_probs, advantages):
    return TokenLoss(-log_probs * advantages, {"x": advantages.mean()})


def in_place(log_probs, advantages):
    advantages *= 2
    return -log_probs * advantages


def random(log_probs, advantages):
    return -log_probs * advantages * torch.rand_like(advantages)


def not_homogeneous(log_probs, advantages):
    return -log_probs * advantages + log_probs


not_homogeneous.homogeneous = True


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (no_gradient, "no gradient"),
        (infinite_gradient, "not finite"),
        (unmasked_mean, "padding changes"),
        (stat_with_gradient, "not one constant per token"),
        (stat_already_reduced, "not one constant per token"),
        (in_place, "in place"),
        (random, "the loss is random"),
        (not_homogeneous, "homogeneous = True"),
    ],
)
def test_each_breach_is_named(loss, message):
    with pytest.raises(InputError, match=f"{loss.__name__}.*{message}"):
        check_loss(loss)


def test_a_mean_over_the_batch_is_refused_and_a_hidden_one_reported():
    with pytest.raises(ConfigError, match="must not take a mean"):
        check_loss(lambda log_probs: -log_probs.mean())

    def centred(log_probs, advantages, loss_mask):
        mean = torch.where(loss_mask, advantages, 0.0).sum() / loss_mask.sum()
        return -log_probs * (advantages - mean)

    report = check_loss(centred)
    assert report.depends_on_micro_batch and not report.homogeneous


def row_sum(log_probs, old_log_probs, advantages, loss_mask):
    mean = (log_probs - old_log_probs).sum(-1, keepdim=True) / loss_mask.sum(-1, keepdim=True)
    return -mean.exp() * advantages


def clamped_above(log_probs, advantages):
    return -log_probs * advantages.clamp(-5.0, 5.0)


clamped_above.homogeneous = True


def test_a_sum_along_the_row_must_ask_for_sequences():
    with pytest.raises(InputError, match="ask for `sequences`"):
        check_loss(row_sum)


def test_homogeneous_means_for_large_advantages_too():
    with pytest.raises(InputError, match="homogeneous = True, but"):
        check_loss(clamped_above)


def test_covariance_thresholds_are_seen_at_their_defaults():
    assert check_loss("clip_cov", cov_fraction=0.2).depends_on_micro_batch
