"""The whole per-token loss: policy term + KL term - entropy term, weighted and summed.

    l_t = loss(log_probs, ...) + kl_coef * kl_t - entropy_coef * H_t
    loss_sum = sum_t w_t * l_t

The same object serves every backend; what the backend's gradient averaging needs is multiplied on
afterwards (`mcore.scaling`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError, InputError
from ..metrics import MetricTensors, masked_max, mean_pair, sum_pair
from ..ops.kl import kl_estimator, kl_penalty
from ..ops.ratios import ratio
from ..ops.reduction import masked_sum
from ..types import TokenLoss
from .registry import LossSpec, check_settings, loss_spec


@dataclass(frozen=True)
class Objective:
    """What is minimised, as a function of log-probs and entropy.

    Attributes:
        loss: name, import path or function of the policy (or supervised) loss.
        loss_settings: its settings.
        kl_coef: weight of the KL term to `ref_log_probs`, >= 0.
        kl_estimator: "k1", "k2" or "k3".
        entropy_coef: weight of the entropy bonus; positive rewards entropy.
        on_policy: the batch was sampled from the current weights and is used for exactly one
            step, so `old_log_probs` are the current log-probs (detached) and need not be given.

    Raises:
        ConfigError: unknown loss, setting or estimator; a negative or non-finite coefficient.
    """

    loss: str | Callable[..., Any] = "ppo_clip"
    loss_settings: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    on_policy: bool = False

    def __post_init__(self) -> None:
        check_settings(self.spec, dict(self.loss_settings))
        kl_estimator(self.kl_estimator)
        if not 0.0 <= self.kl_coef < float("inf"):
            raise ConfigError(f"kl_coef must be finite and >= 0, got {self.kl_coef}.")
        if not abs(self.entropy_coef) < float("inf"):
            raise ConfigError(f"entropy_coef must be finite, got {self.entropy_coef}.")

    @property
    def spec(self) -> LossSpec:
        return loss_spec(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        """Tensors of the micro-batch that must be there."""
        made_here = {"log_probs", "entropy"} | ({"old_log_probs"} if self.on_policy else set())
        names = [name for name in self.spec.needs if name not in made_here]
        if self.kl_coef and "ref_log_probs" not in names:
            names.append("ref_log_probs")
        return tuple(names)

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef != 0.0 or "entropy" in self.spec.needs

    @property
    def homogeneous(self) -> bool:
        """Whether the advantages alone may carry the token weights."""
        return self.spec.homogeneous and not self.kl_coef and not self.entropy_coef

    def check_weights(self, weights_given: bool) -> None:
        """Raises `InputError` if this objective needs explicit weights and has none."""
        if self.homogeneous or weights_given:
            return
        terms = [
            text
            for text, there in (
                (f"the loss {self.loss!r}", not self.spec.homogeneous),
                (f"kl_coef={self.kl_coef}", self.kl_coef),
                (f"entropy_coef={self.entropy_coef}", self.entropy_coef),
            )
            if there
        ]
        raise InputError(
            f"{' and '.join(terms)} need 'loss_weights' in the micro-batch beside raw advantages: "
            "pre-normalised advantages cannot carry the weights of these terms. Pass "
            "loss_weights=token_weights(loss_mask, reduction, ...); reduction 'sum' for plain sums."
        )

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor | None,
        tensors: Mapping[str, Tensor],
        loss_mask: Tensor,
        loss_weights: Tensor,
        *,
        share: float = 1.0,
    ) -> tuple[Tensor, MetricTensors]:
        """Returns the local weighted sum and the metrics of one micro-batch.

        Args:
            log_probs: [rows, S] fp32, nats; gets the gradient.
            entropy: [rows, S] fp32, nats, or None if it is neither trained nor reported.
            tensors: `needs` by name, each [rows, S], constant; more are used for metrics.
            loss_mask: [rows, S] bool. Other positions add exactly 0 to loss and gradients.
            loss_weights: [rows, S] fp32, constant.
            share: this micro-batch's share of the sum metrics, 1 / (M * D * C).
        """
        clean = _clean(dict(tensors, log_probs=log_probs), loss_mask)
        if entropy is not None:
            clean["entropy"] = torch.where(loss_mask, entropy.float(), 0.0)
        if self.on_policy:
            clean["old_log_probs"] = clean["log_probs"].detach()
        weights = torch.where(loss_mask, loss_weights, 0.0)
        policy = self._policy_loss(clean)
        sums = {"policy_loss": masked_sum(policy.loss, weights)}
        means = dict(policy.stats)
        self._add_kl(sums, means, clean, weights)
        self._add_entropy(sums, means, clean, weights)
        loss_sum = torch.stack(list(sums.values())).sum()
        sums |= {"loss": loss_sum, "num_tokens": loss_mask.sum()}
        metrics = {name: sum_pair(value, share) for name, value in sums.items()}
        metrics |= {name: mean_pair(values, loss_mask) for name, values in means.items()}
        metrics |= _log_prob_metrics(clean, loss_mask)
        return loss_sum, metrics

    def _policy_loss(self, clean: Mapping[str, Tensor]) -> TokenLoss:
        result = self.spec.fn(*(clean[name] for name in self.spec.needs), **self.loss_settings)
        result = result if isinstance(result, tuple) else TokenLoss(result, {})
        if result[0].shape != clean["log_probs"].shape:
            raise InputError(
                f"loss {self.loss!r} returned shape {tuple(result[0].shape)}, expected one value "
                f"per token, {tuple(clean['log_probs'].shape)}: a loss must not take a mean or sum."
            )
        return TokenLoss(*result)

    def _add_kl(self, sums: dict, means: dict, clean: Mapping[str, Tensor], weights: Tensor) -> None:
        if "ref_log_probs" not in clean:
            return
        kl = kl_penalty(clean["log_probs"], clean["ref_log_probs"], self.kl_estimator)
        means["kl"] = kl
        if self.kl_coef:
            sums["kl_loss"] = self.kl_coef * masked_sum(kl, weights)

    def _add_entropy(
        self, sums: dict, means: dict, clean: Mapping[str, Tensor], weights: Tensor
    ) -> None:
        if "entropy" not in clean:
            return
        means["entropy"] = clean["entropy"]
        if self.entropy_coef:
            sums["entropy_loss"] = -self.entropy_coef * masked_sum(clean["entropy"], weights)


def _clean(tensors: Mapping[str, Tensor], loss_mask: Tensor) -> dict[str, Tensor]:
    """Sets masked positions to 0 before any arithmetic: a NaN there would poison gradients."""
    return {name: torch.where(loss_mask, value.float(), 0.0) for name, value in tensors.items()}


def _log_prob_metrics(clean: Mapping[str, Tensor], loss_mask: Tensor) -> MetricTensors:
    metrics: MetricTensors = {}
    log_probs = clean["log_probs"].detach()
    if "old_log_probs" in clean:
        metrics["ratio_max"] = masked_max(ratio(log_probs, clean["old_log_probs"]), loss_mask)
    if "rollout_log_probs" in clean:
        gap = (log_probs - clean["rollout_log_probs"]).abs()
        metrics["rollout_log_prob_diff"] = mean_pair(gap, loss_mask)
        metrics["rollout_log_prob_diff_max"] = masked_max(gap, loss_mask)
    return metrics
