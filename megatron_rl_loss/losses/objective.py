"""The whole per-token loss: policy term + KL term - entropy term, weighted and summed.

    l_t = c_t * loss(log_probs, ...) + kl_coef * kl_t - entropy_coef * H_t
    loss_sum = sum_t w_t * l_t

c_t is 1, or the correction for the rollout policy (`losses.off_policy`). The same object serves
every backend; what the backend's gradient averaging needs is multiplied on afterwards
(`mcore.scaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import check_same_shape
from ..errors import ConfigError, InputError
from ..metrics import MetricTensors, masked_max, mean_pair, sum_pair
from ..ops.kl import check_kl_estimator, is_weighted_kl, kl_penalty
from ..ops.precision import at_least_fp32
from ..ops.ratios import ratio
from ..ops.reduction import masked_sum
from ..ops.sequences import Sequences
from ..types import PER_TOKEN_SET_FIELDS, TOKEN_IDS_FIELD, TokenLoss
from .off_policy import OffPolicy, correction, mismatch_stats
from .registry import MADE_BY_OBJECTIVE, LossSpec, check_settings, loss_spec


@dataclass(frozen=True)
class Objective:
    """What is minimised, as a function of log-probs and entropy.

    Attributes:
        loss: name, import path or function of the policy (or supervised) loss.
        loss_settings: its settings.
        kl_coef: weight of the KL term to `ref_log_probs`, >= 0.
        kl_estimator: one of `ops.kl.KL_ESTIMATORS`.
        kl_is_weighted: multiply the KL by the ratio to `old_log_probs`, with gradient.
        entropy_coef: weight of the entropy bonus; positive rewards entropy.
        entropy_max: entropy above it earns nothing (and has gradient 0), nats; None: no bound.
        on_policy: the batch was sampled from the current weights and is used for exactly one
            step, so `old_log_probs` are the current log-probs (detached) and need not be given.
        off_policy: correction for the rollout policy, an `OffPolicy` or a dict of its settings.

    Raises:
        ConfigError: unknown loss, setting or estimator, a value out of range, or a loss that fails
            on (or reduces) a small example.
    """

    loss: str | Callable[..., Any] = "ppo_clip"
    loss_settings: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_is_weighted: bool = False
    entropy_coef: float = 0.0
    entropy_max: float | None = None
    on_policy: bool = False
    off_policy: OffPolicy | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_settings(self.spec, dict(self.loss_settings))
        for name in ("kl_coef", "entropy_coef", "entropy_max"):
            value = getattr(self, name)
            given = value is not None or name != "entropy_max"
            if given and not isinstance(value, (int, float)):
                raise ConfigError(f"{name} must be a number, got {value!r}.")
        check_kl_estimator(self.kl_estimator, is_weighted=self.kl_is_weighted)
        if not 0.0 <= self.kl_coef < float("inf"):
            raise ConfigError(f"kl_coef must be finite and >= 0, got {self.kl_coef}.")
        if not abs(self.entropy_coef) < float("inf"):
            raise ConfigError(f"entropy_coef must be finite, got {self.entropy_coef}.")
        if self.entropy_max is not None and not self.entropy_max > 0.0:
            raise ConfigError(f"entropy_max must be > 0 nats, got {self.entropy_max}.")
        if isinstance(self.off_policy, Mapping):
            object.__setattr__(self, "off_policy", _off_policy(self.off_policy))
        if self.off_policy is not None and not isinstance(self.off_policy, OffPolicy):
            raise ConfigError(
                "off_policy must be an OffPolicy, a dict of its settings or None, got "
                f"{self.off_policy!r}."
            )
        self._try_out()

    @property
    def spec(self) -> LossSpec:
        return loss_spec(self.loss)

    @property
    def _correction(self) -> OffPolicy | None:
        return self.off_policy if isinstance(self.off_policy, OffPolicy) else None

    @property
    def needs(self) -> tuple[str, ...]:
        """Tensors of the micro-batch that must be there."""
        names = list(self.spec.needs)
        names += [TOKEN_IDS_FIELD] if self.spec.reads_token_set else []
        if self.kl_coef:
            names.append("ref_log_probs")
            names += ["old_log_probs"] if self.kl_is_weighted else []
        if self._correction is not None:
            names += self._correction.needs
        made_here = MADE_BY_OBJECTIVE + (("old_log_probs",) if self.on_policy else ())
        return tuple(dict.fromkeys(name for name in names if name not in made_here))

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef != 0.0 or "entropy" in self.spec.needs

    @property
    def needs_sequences(self) -> bool:
        """Whether it sums over whole sequences, and so must know them in packed or split rows."""
        in_correction = self._correction is not None and self._correction.needs_sequences
        return in_correction or "sequences" in self.spec.needs

    @property
    def homogeneous(self) -> bool:
        """Whether the advantages alone may carry the token weights."""
        return self.spec.homogeneous and not self.kl_coef and not self.entropy_coef

    def check_token_level(self) -> None:
        """Raises `ConfigError` unless some tokens' losses need those tokens alone."""
        reasons = [
            text
            for text, there in (
                ("sums over whole sequences", self.needs_sequences),
                ("ranks the tokens of a micro-batch", self.spec.depends_on_micro_batch),
                ("reads log-probs of given tokens", self.spec.reads_token_set),
                ("does not say fn.token_level = True of itself", not self.spec.token_level),
            )
            if there
        ]
        if reasons:
            raise ConfigError(
                f"lm_head='fused_forward' makes gradients token by token, but the loss "
                f"{self.loss!r} (with its off_policy correction) {' and '.join(reasons)}; use "
                "lm_head='fused'."
            )

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
        sequences: Sequences | None = None,
        token_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, MetricTensors]:
        """Returns the local weighted sum and the metrics of one micro-batch.

        Args:
            log_probs: [rows, S] fp32, nats; gets the gradient.
            entropy: [rows, S] fp32, nats, or None if it is neither trained nor reported.
            tensors: `needs` by name, each [rows, S] or, of several tokens, [rows, S, k], constant;
                more are used for metrics.
            loss_mask: [rows, S] bool. Other positions add exactly 0 to loss and gradients.
            loss_weights: [rows, S] fp32, constant.
            share: this micro-batch's share of the sum metrics, 1 / (M * D * C).
            sequences: for packed rows or sequences split over ranks; None: a row is a sequence.
            token_log_probs: [rows, S, k] fp32, nats, of the tokens `TOKEN_IDS_FIELD`, for a loss
                that reads them; gets the gradient.

        Raises:
            InputError: something that is needed is missing, or a shape would be broadcast.

        Communicates: only through `sequences`, if the loss or the correction asks for it.
        """
        check_same_shape("loss_weights", loss_weights, "loss_mask", loss_mask)
        self._check_given(tensors, entropy, token_log_probs)
        made = {"log_probs": log_probs, "entropy": entropy, "token_log_probs": token_log_probs}
        clean = self._clean(made, tensors, loss_mask)
        sequences = sequences or Sequences(loss_mask)
        weights = torch.where(loss_mask, loss_weights, 0.0)
        policy = self._policy_loss(clean, loss_mask, sequences)
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

    def _check_given(
        self, tensors: Mapping[str, Tensor], entropy: Tensor | None, of_set: Tensor | None
    ) -> None:
        # the ids are for whoever makes the set's log-probs
        missing = [x for x in self.needs if x not in tensors and x != TOKEN_IDS_FIELD]
        missing += ["token_log_probs"] if self.spec.reads_token_set and of_set is None else []
        missing += ["entropy"] if self.needs_entropy_gradient and entropy is None else []
        if missing:
            raise InputError(
                f"the objective with the loss {self.loss!r} needs {', '.join(missing)}, got "
                f"{', '.join(tensors) or 'no tensors'}; `needs` lists what to give."
            )

    def _clean(
        self,
        made: Mapping[str, Tensor | None],
        tensors: Mapping[str, Tensor],
        loss_mask: Tensor,
    ) -> dict[str, Tensor]:
        """Sets masked positions to 0 before any arithmetic: a NaN there would poison gradients."""
        if "rollout_is_weights" in tensors and "rollout_is_weights" not in self.needs:
            raise InputError(
                "the micro-batch has rollout_is_weights, which nothing reads; set off_policy="
                "{'is_level': 'given'} to multiply the loss by them, or leave them out."
            )
        given = {**tensors, **{k: v for k, v in made.items() if v is not None}}
        clean = {name: _masked(name, value, loss_mask) for name, value in given.items()}
        if self.on_policy:
            clean["old_log_probs"] = clean["log_probs"].detach()
        return clean

    def _policy_loss(
        self, clean: Mapping[str, Tensor], loss_mask: Tensor, sequences: Sequences
    ) -> TokenLoss:
        given = dict(clean, loss_mask=loss_mask, sequences=sequences)
        result = self.spec.fn(*(given[name] for name in self.spec.needs), **self.loss_settings)
        result = TokenLoss(*result) if isinstance(result, tuple) else TokenLoss(result, {})
        if result.loss.shape != clean["log_probs"].shape:
            raise InputError(
                f"loss {self.loss!r} returned shape {tuple(result.loss.shape)}, expected one value "
                f"per token, {tuple(clean['log_probs'].shape)}: a loss must not take a mean or sum."
            )
        if self._correction is None:
            return result
        factor, stats = correction(self._correction, clean, sequences)
        # a token that is left out must not bring its inf or NaN along
        loss = torch.where(factor != 0, result.loss, 0.0) * factor
        return TokenLoss(loss, {**result.stats, **stats})

    def _add_kl(
        self, sums: dict, means: dict, clean: Mapping[str, Tensor], weights: Tensor
    ) -> None:
        if "ref_log_probs" not in clean:
            return
        log_probs, ref_log_probs = clean["log_probs"], clean["ref_log_probs"]
        kl = kl_penalty(log_probs, ref_log_probs, self.kl_estimator)
        means["kl"] = kl
        if self.kl_coef and self.kl_is_weighted:
            kl = is_weighted_kl(log_probs, clean["old_log_probs"], ref_log_probs, self.kl_estimator)
        if self.kl_coef:
            sums["kl_loss"] = self.kl_coef * masked_sum(kl, weights)

    def _add_entropy(
        self, sums: dict, means: dict, clean: Mapping[str, Tensor], weights: Tensor
    ) -> None:
        if "entropy" not in clean:
            return
        entropy = clean["entropy"]
        means["entropy"] = entropy
        if self.entropy_coef:
            sums["entropy_loss"] = -self.entropy_coef * masked_sum(
                entropy.clamp(max=self.entropy_max) if self.entropy_max else entropy, weights
            )

    def _try_out(self) -> None:
        """Calls the loss on a small example, so that a bad setting fails here, not in a step."""
        loss_mask = torch.ones(2, 3, dtype=torch.bool)
        names = {*self.needs, "log_probs", "entropy", "old_log_probs", "token_log_probs"}
        tensors = {name: torch.zeros(2, 3, 4 if is_of_set(name) else 1) for name in names}
        tensors = {k: v if is_of_set(k) else v[..., 0] for k, v in tensors.items()}
        try:
            self._policy_loss(tensors, loss_mask, Sequences(loss_mask))
        except (ConfigError, InputError) as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            raise ConfigError(
                f"loss {self.loss!r} fails on a small example of zeros, shape (2, 3): "
                f"{type(error).__name__}: {error}"
            ) from error


def is_of_set(name: str) -> bool:
    """Whether a tensor has k entries per token."""
    return name == "token_log_probs" or name in PER_TOKEN_SET_FIELDS


def _masked(name: str, value: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns the value with 0 where masked.

    Raises:
        InputError: it is neither of the mask's shape nor, of several tokens, [rows, S, k].
    """
    shape = value.shape[:-1] if is_of_set(name) else value.shape
    if shape != loss_mask.shape:
        raise InputError(
            f"{name} has shape {tuple(value.shape)}, but loss_mask has "
            f"{tuple(loss_mask.shape)}; nothing is broadcast."
        )
    mask = loss_mask.unsqueeze(-1) if is_of_set(name) else loss_mask
    return torch.where(mask, at_least_fp32(value), 0.0)


def _off_policy(settings: Mapping[str, Any]) -> OffPolicy:
    try:
        return OffPolicy(**settings)
    except TypeError:
        known = list(OffPolicy.__dataclass_fields__)
        raise ConfigError(
            f"off_policy has unknown settings {sorted(set(settings) - set(known))} or wrong types; "
            f"known: {', '.join(known)}."
        ) from None


def _log_prob_metrics(clean: Mapping[str, Tensor], loss_mask: Tensor) -> MetricTensors:
    metrics: MetricTensors = {}
    log_probs = clean["log_probs"].detach()
    if "old_log_probs" in clean:
        metrics["ratio_max"] = masked_max(ratio(log_probs, clean["old_log_probs"]), loss_mask)
    if "rollout_log_probs" in clean:
        gap = (log_probs - clean["rollout_log_probs"]).abs()
        metrics["rollout_log_prob_diff"] = mean_pair(gap, loss_mask)
        metrics["rollout_log_prob_diff_max"] = masked_max(gap, loss_mask)
    if "rollout_log_probs" in clean and "old_log_probs" in clean:
        stats = mismatch_stats(clean["old_log_probs"], clean["rollout_log_probs"])
        metrics |= {name: mean_pair(values, loss_mask) for name, values in stats.items()}
    return metrics
