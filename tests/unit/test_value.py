from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError
from megatron_rl_loss.losses.value import ValueObjective, clipped_value_loss
from megatron_rl_loss.metrics import reduce_metrics


def case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[1] = False
    weights = torch.where(mask, torch.rand(4, 6, generator=generator), 0.0)
    return values, {"old_values": old, "returns": returns}, mask, weights


def step(objective, values, tensors, mask, weights, share=1.0):
    values = values.clone().requires_grad_()
    loss, metrics = objective(values, tensors, mask, weights, share=share)
    loss.backward()
    return loss.detach(), values.grad, metrics


def test_value_and_gradient_token_by_token():
    values, tensors, mask, weights = case()
    loss, gradient, metrics = step(ValueObjective(value_coef=0.5), values, tensors, mask, weights)
    total, clipped = 0.0, 0
    for row, t in mask.nonzero().tolist():
        v, old, target = (
            x[row, t].item() for x in (values, tensors["old_values"], tensors["returns"])
        )
        near = min(max(v, old - 0.2), old + 0.2)
        free, held = (v - target) ** 2, (near - target) ** 2
        w = weights[row, t].item()
        total += 0.5 * w * 0.5 * max(free, held)
        slope = v - target if free >= held else 0.0
        clipped += held > free
        assert gradient[row, t].item() == pytest.approx(0.5 * w * slope, abs=1e-6)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert metrics["value_clip_fraction"].tolist() == [clipped, mask.sum()]
    assert clipped > 0 and not gradient[~mask].any()


def test_gradcheck():
    values, tensors, _, _ = case()
    for value_clip in (0.2, None):
        assert torch.autograd.gradcheck(
            lambda v, clip=value_clip: (
                clipped_value_loss(
                    v, tensors["old_values"], tensors["returns"], value_clip=clip
                ).loss
            ),
            (values.clone().requires_grad_(),),
        )


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_masked_positions_change_no_bit(garbage):
    values, tensors, mask, weights = case(torch.float32)
    want = step(ValueObjective(), values, tensors, mask, weights)
    dirty = {k: torch.where(mask, v, garbage) for k, v in tensors.items()}
    got = step(ValueObjective(), torch.where(mask, values, garbage), dirty, mask, weights)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert all(torch.equal(got[2][key], want[2][key]) for key in want[2])


def test_explained_variance_is_the_same_for_any_cut():
    values, tensors, mask, weights = case()
    error = (tensors["returns"] - values)[mask]
    want = 1 - error.var(unbiased=False) / tensors["returns"][mask].var(unbiased=False)
    for size in (1, 2, 4):
        metrics = []
        for i in range(0, 4, size):
            rows = slice(i, i + size)
            cut = {k: v[rows] for k, v in tensors.items()}
            share = size / 4
            metrics.append(
                step(ValueObjective(), values[rows], cut, mask[rows], weights[rows], share)[2]
            )
        got = reduce_metrics(metrics)
        assert got["explained_variance"] == pytest.approx(want.item(), abs=1e-5)


def test_nothing_trained_gives_zero():
    values, tensors, mask, weights = case()
    loss, gradient, metrics = step(
        ValueObjective(), values, tensors, torch.zeros_like(mask), weights
    )
    assert loss == 0 and not gradient.any()
    assert reduce_metrics([metrics])["explained_variance"] == 0.0


def test_weights_and_shapes_are_demanded():
    values, tensors, mask, weights = case()
    with pytest.raises(InputError, match="needs 'loss_weights'"):
        ValueObjective().check_weights(False)
    with pytest.raises(InputError, match="returns has shape"):
        ValueObjective()(values, {**tensors, "returns": values[:, 0]}, mask, weights)


@pytest.mark.parametrize("settings", [{"value_clip": 0.0}, {"value_coef": -1.0}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ValueObjective(**settings)
