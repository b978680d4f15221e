"""The critic's loss: no advantage carries its weights, so it always takes them explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import check_same_shape
from ..errors import InputError
from ..metrics import MetricTensors, mean_pair, sum_pair
from ..ops.precision import at_least_fp32
from ..ops.reduction import masked_sum
from ..types import TokenLoss
from .bounds import check_positive


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None = 0.2
) -> TokenLoss:
    """Squared error of the values, with changes beyond a band not rewarded.

    Formula: l = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), c = value_clip;
    l = 1/2 (V - R)^2 for None.

    Args:
        values: V, the critic's output, any shape, reward units; gets the gradient.
        old_values: V_old, the critic at the start of the step, same shape, constant.
        returns: R, same shape, constant.
        value_clip: c, reward units, > 0; None: no clip.

    Returns:
        `TokenLoss` with the stat `value_clip_fraction` (1 where the clip binds).

    Source: Schulman et al., PPO (2017), in the form of OpenAI baselines.
    """
    if value_clip is None:
        return TokenLoss(0.5 * (values - returns).square(), {})
    check_positive("value_clip", value_clip)
    free = (values - returns).square()
    near = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    held = (near - returns).square()
    return TokenLoss(
        0.5 * torch.maximum(free, held), {"value_clip_fraction": (held > free).float()}
    )


@dataclass(frozen=True)
class ValueObjective:
    """What a critic minimises, with the same call as `Objective` and values for log-probs.

    Attributes:
        value_clip: see `clipped_value_loss`.
        value_coef: weight of the loss, > 0.

    Raises:
        ConfigError: a value is out of range.
    """

    value_clip: float | None = 0.2
    value_coef: float = 1.0

    needs: ClassVar[tuple[str, ...]] = ("old_values", "returns")
    needs_entropy_gradient: ClassVar[bool] = False
    homogeneous: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("value_coef", self.value_coef)
        if self.value_clip is not None:
            check_positive("value_clip", self.value_clip)

    def check_weights(self, weights_given: bool) -> None:
        """Raises `InputError` without explicit weights: no advantage carries them here."""
        if not weights_given:
            raise InputError(
                "the value loss needs 'loss_weights' in the micro-batch: pass "
                "loss_weights=token_weights(loss_mask, reduction, ...)."
            )

    def __call__(
        self,
        values: Tensor,
        tensors: Mapping[str, Tensor],
        loss_mask: Tensor,
        loss_weights: Tensor,
        *,
        share: float = 1.0,
    ) -> tuple[Tensor, MetricTensors]:
        """Returns the local weighted sum and the metrics of one micro-batch.

        Args:
            values: [rows, S], reward units; gets the gradient.
            tensors: `old_values` and `returns`, [rows, S], constant.
            loss_mask, loss_weights, share: as in `Objective`.

        Metrics: loss, num_tokens, value_mean, value_clip_fraction; return_mean, return_sq_mean,
        value_error_mean and value_error_sq_mean, of which `metrics` makes the explained variance.
        """
        named = {"values": values, **{name: tensors[name] for name in self.needs}}
        for name, tensor in named.items():
            check_same_shape(name, tensor, "loss_mask", loss_mask)
        check_same_shape("loss_weights", loss_weights, "loss_mask", loss_mask)
        v, old, target = (torch.where(loss_mask, at_least_fp32(named[name]), 0.0) for name in named)
        token_loss = clipped_value_loss(v, old, target, value_clip=self.value_clip)
        weights = torch.where(loss_mask, loss_weights, 0.0)
        loss_sum = self.value_coef * masked_sum(token_loss.loss, weights)
        error = target - v.detach()
        means = {
            **token_loss.stats,
            "value_mean": v.detach(),
            "return_mean": target,
            "return_sq_mean": target.square(),
            "value_error_mean": error,
            "value_error_sq_mean": error.square(),
        }
        metrics = {name: mean_pair(x, loss_mask) for name, x in means.items()}
        metrics["loss"] = sum_pair(loss_sum, share)
        metrics["num_tokens"] = sum_pair(loss_mask.sum(), share)
        return loss_sum, metrics
