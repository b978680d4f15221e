"""The same inputs through verl's published losses; runs only where verl can be imported.

verl aggregates itself, so loss gradients are compared under its `token-mean` (here: weights
1 / N), or under `seq-mean-token-mean` (1 / (B len)) where it insists on that. Deliberate
differences, which the inputs below avoid:

* verl clips a log-ratio at +-20 but a sequence's at +10; here both at +-20.
* verl bounds k3's value to 10 and cuts its gradient there; here it goes on.
* verl's DPPO truncates the ratio at 20; here r <= exp(20).
* a group of one keeps its raw reward as GRPO advantage in verl; here it is 0.
* clip_cov draws at random in verl; here every k-th candidate is taken (compared taking all).
* fully masked sequences do not count in verl's sequence means; here they do by default.
* verl whitens GAE advantages inside; here that is `parallel.whitening` (returns are compared).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl_loss.losses.objective import Objective
from megatron_rl_loss.losses.value import clipped_value_loss
from megatron_rl_loss.ops.advantages import grpo_advantages, opo_advantages, rloo_advantages
from megatron_rl_loss.ops.gae import gae
from megatron_rl_loss.ops.kl import kl_penalty
from megatron_rl_loss.parallel.whitening import whiten
from tests.unit.loss_cases import random_case
from tests.unit.test_losses import objective_step

verl = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


def config(low=0.2, high=0.2, clip_ratio_c=3.0, **others):
    """An ActorConfig without its checks, which ask for a whole training job."""
    made = object.__new__(verl.ActorConfig)
    made.__dict__.update(
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=clip_ratio_c,
        global_batch_info={},
        policy_loss=SimpleNamespace(
            clip_cov_ratio=1.0,
            clip_cov_lb=-0.1,
            clip_cov_ub=0.4,
            kl_cov_ratio=0.25,
            ppo_kl_coef=2.0,
            dro_beta=0.5,
        ),
        **others,
    )
    return made


CLIP = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3}
COV = {"cov_fraction": 1.0, "cov_min": -0.1, "cov_max": 0.4}
CASES = [
    ("vanilla", config(0.15, 0.3), "dual_clip", CLIP, "token"),
    ("gpg", config(), "policy_gradient", {}, "token"),
    ("cispo", config(0.15, 0.3), "cispo", CLIP, "token"),
    ("sapo", config(tau_pos=1.0, tau_neg=1.05), "sapo", {}, "sequence"),
    ("gspo", config(0.15, 0.3), "gspo_token", CLIP, "token"),
    ("gspo", config(0.15, 0.3), "gspo_token", CLIP, "sequence"),
    ("dro", config(), "dro", {"beta": 0.5}, "token"),
    ("dppo_tv", config(0.05, 0.05, 20.0), "dppo_tv", {"divergence_max": 0.05}, "token"),
    ("dppo_kl", config(0.01, 0.01, 20.0), "dppo_kl", {"divergence_max": 0.01}, "token"),
    ("clip_cov", config(), "clip_cov", COV, "token"),
    ("kl_cov", config(), "kl_cov", {"cov_fraction": 0.25, "cov_kl_coef": 2.0}, "token"),
]
MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean"}


def case():
    tensors, mask, _ = random_case(rows=6, length=9, dtype=torch.float32)
    mask[1] = mask[2].clone()
    mask[:, 0] = True  # no sequence without a trained token
    fill = {"log_probs": -1.2, "old_log_probs": -1.4}
    tensors = {
        k: torch.where(mask, torch.where(v == 0, fill.get(k, 0.3), v), 0.0)
        for k, v in tensors.items()
    }
    return tensors, mask


@pytest.mark.parametrize(("theirs", "settings", "ours", "our_settings", "mean"), CASES)
@pytest.mark.parametrize("with_is_weights", [False, True])
def test_policy_gradient_equals_verl(theirs, settings, ours, our_settings, mean, with_is_weights):
    tensors, mask = case()
    rho = torch.rand(mask.shape) if with_is_weights else None
    log_probs = tensors["log_probs"].clone().requires_grad_()
    loss, _ = verl.get_policy_loss_fn(theirs)(
        old_log_prob=tensors["old_log_probs"],
        log_prob=log_probs,
        advantages=tensors["advantages"],
        response_mask=mask.float(),
        loss_agg_mode=MODES[mean],
        config=settings,
        rollout_is_weights=rho,
    )
    loss.backward()
    count = mask.sum() if mean == "token" else len(mask) * mask.sum(1, keepdim=True)
    objective = Objective(
        ours, our_settings, off_policy={"is_level": "given"} if with_is_weights else None
    )
    given = tensors | ({"rollout_is_weights": rho} if with_is_weights else {})
    _, gradient, _ = objective_step(objective, given, mask, mask.float() / count)
    torch.testing.assert_close(gradient, log_probs.grad, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-3


def test_geometric_mean_equals_verl():
    tensors, mask = case()
    tensors["advantages"] = torch.where(mask, tensors["advantages"][:, :1], 0.0)
    log_probs = tensors["log_probs"].clone().requires_grad_()
    loss, _ = verl.get_policy_loss_fn("geo_mean")(
        old_log_prob=tensors["old_log_probs"],
        log_prob=log_probs,
        advantages=tensors["advantages"],
        response_mask=mask.float(),
        config=config(0.1, 0.2),
    )
    loss.backward()
    objective = Objective("gmpo", {"log_clip_low": 0.1, "log_clip_high": 0.2})
    weights = mask.float() / (len(mask) * mask.sum(1, keepdim=True))
    got, gradient, _ = objective_step(objective, tensors, mask, weights)
    torch.testing.assert_close(got, loss.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, log_probs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_kl_equals_verl(name):
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(50, generator=generator)
    results = []
    for penalty in (verl.kl_penalty, kl_penalty):
        log_probs = (ref + torch.linspace(-2, 2, 50)).requires_grad_()
        kl = penalty(log_probs, ref, name)
        kl.sum().backward()
        results.append((kl.detach(), log_probs.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.5, -2.0, 1.0, 3.0])
GROUPS = torch.tensor([5, 9, 5, 9, 9, 5, 9])
MASK = torch.arange(6)[None] < torch.tensor([3, 1, 4, 2, 5, 6, 2])[:, None]


def verl_advantages(name):
    token_rewards = torch.zeros(7, 6)
    token_rewards[:, 0] = REWARDS
    fn = getattr(verl, f"compute_{name}_outcome_advantage")
    return fn(token_rewards, MASK.float(), index=np.array(GROUPS.tolist()))[0]


def test_advantages_equal_verl():
    lengths = MASK.sum(1)
    whitened = whiten(grpo_advantages(REWARDS, GROUPS, normalize_by_std=False), MASK)
    ours = {
        "grpo": grpo_advantages(REWARDS, GROUPS)[:, None] * MASK,
        "rloo": rloo_advantages(REWARDS, GROUPS)[:, None] * MASK,
        "opo": opo_advantages(REWARDS, GROUPS, num_tokens=lengths)[:, None] * MASK,
        "reinforce_plus_plus_baseline": whitened,
    }
    for name, got in ours.items():
        torch.testing.assert_close(got, verl_advantages(name), rtol=1e-5, atol=1e-5, msg=name)


def test_returns_of_gae_equal_verl():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 8, generator=generator)
    mask = torch.rand(4, 8, generator=generator) < 0.7
    _, want = verl.compute_gae_advantage_return(rewards * mask, values, mask.float(), 0.97, 0.9)
    _, got = gae(rewards, values, mask, discount=0.97, gae_lambda=0.9)
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=1e-5)


def test_value_loss_equals_verl():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4, 8, generator=generator)
    mask = torch.rand(4, 8, generator=generator) < 0.7
    theirs, ours = (values.clone().requires_grad_() for _ in range(2))
    loss, _ = verl.compute_value_loss(theirs, returns, old, mask.float(), 0.2)
    loss.backward()
    clipped_value_loss(ours, old, returns).loss[mask].mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
