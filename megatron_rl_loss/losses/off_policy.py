"""Corrections for tokens that another policy sampled than the one the loss calls old.

The rollout engine samples from mu (`rollout_log_probs`): other kernels, another precision, older
weights. The policy loss, made with `old_log_probs` of the trainer, is multiplied by a constant

    c_t = weight_t * keep_t,    rho = exp(old_log_probs - rollout_log_probs)

With PPO's ratio to the old policy this is decoupled (three-policy) PPO. KL and entropy terms are
not multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.ratios import bounded_exp, log_ratio
from ..ops.sequences import Sequences

LEVELS = ("token", "sequence", "geometric")
IS_LEVELS = (*LEVELS, "given")
REJECT_LEVELS = (*LEVELS, "any_token")


@dataclass(frozen=True)
class OffPolicy:
    """How a policy loss is corrected for the rollout policy; every part is off by default.

    Levels: "token" rho_t; "sequence" the product of rho over the sequence; "geometric" its
    length-normalised product exp(mean log rho). Logs are clamped to +-20.

    Rejected tokens add 0 to the loss and **stay in the counts**, since token weights are fixed
    before the step. To take them out of the counts as well, train with `kept_tokens(...)` as the
    loss mask, made before the token weights.

    Attributes:
        is_level: importance weight of a token: a level; "given": the micro-batch's
            `rollout_is_weights` as they are, of any sign; None: 1.
        is_min, is_max: band of the weight, 0 <= min < max; not for given weights.
        is_outside: weights outside the band are set to its border ("truncate", TIS) or to 0
            ("mask", icepop).
        reject_level: tokens whose ratio at that level is outside [reject_min, reject_max] are
            rejected; "any_token": sequences with any such token ratio; None: nothing.
        reject_min, reject_max: band, 0 <= min < max.
        negative_max_kl: rejects tokens with A < 0 of sequences that the current policy has left:
            mean(rollout_log_probs - log_probs) > negative_max_kl, nats per token; None: nothing.

    Raises:
        ConfigError: an unknown name, a band that is empty, negative or of given weights.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025) for TIS; Ling Team, "Every Step Evolves" (2025) for icepop; Hilton et al., "Batch
    size-invariance for policy optimization" (2021) for decoupled PPO; DeepSeek-AI,
    "DeepSeek-V3.2" (2025) for negative_max_kl.
    """

    is_level: str | None = None
    is_min: float = 0.0
    is_max: float = 2.0
    is_outside: str = "truncate"
    reject_level: str | None = None
    reject_min: float = 0.5
    reject_max: float = 2.0
    negative_max_kl: float | None = None

    def __post_init__(self) -> None:
        _check_choice("is_level", self.is_level, (None, *IS_LEVELS))
        _check_choice("is_outside", self.is_outside, ("truncate", "mask"))
        _check_choice("reject_level", self.reject_level, (None, *REJECT_LEVELS))
        _check_band("is", self.is_min, self.is_max)
        _check_band("reject", self.reject_min, self.reject_max)
        band = (self.is_min, self.is_max, self.is_outside)
        if self.is_level == "given" and band != (OffPolicy.is_min, OffPolicy.is_max, "truncate"):
            raise ConfigError(
                "is_min, is_max and is_outside bound ratios; the weights of is_level='given' are "
                "multiplied in as they are. Bound them before you pass them."
            )
        if self.negative_max_kl is not None and not 0.0 <= self.negative_max_kl < float("inf"):
            raise ConfigError(
                f"negative_max_kl must be finite and >= 0 nats, got {self.negative_max_kl}."
            )
        if self.is_level is None and self.reject_level is None and self.negative_max_kl is None:
            raise ConfigError(
                "an OffPolicy correction needs is_level, reject_level or negative_max_kl; leave "
                "off_policy None for no correction."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Tensors of the micro-batch that it reads."""
        names = []
        if self.is_level == "given":
            names.append("rollout_is_weights")
        if self.is_level in LEVELS or self.reject_level is not None:
            names += ["old_log_probs", "rollout_log_probs"]
        if self.negative_max_kl is not None:
            names += ["rollout_log_probs", "advantages"]
        return tuple(dict.fromkeys(names))

    @property
    def needs_sequences(self) -> bool:
        """Whether it sums over whole sequences."""
        levels = {self.is_level, self.reject_level}
        return bool(levels & {"sequence", "geometric", "any_token"}) or (
            self.negative_max_kl is not None
        )


def correction(
    off_policy: OffPolicy, tensors: Mapping[str, Tensor], sequences: Sequences
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the factor of each token's policy loss, and stats.

    Args:
        off_policy: the settings.
        tensors: `log_probs` and `off_policy.needs` by name, [rows, S].
        sequences: of the micro-batch.

    Returns:
        [rows, S] constant, >= 0 unless weights are given; stats `is_weight_mean` and
        `is_weight_sq_mean` (their ratio mean^2 / sq_mean is the effective share of tokens); where
        there is such a band, `is_outside_fraction` and `rejected_fraction`.
    """
    weight, stats = _weights(off_policy, tensors, sequences)
    rejected = _rejected(off_policy, tensors, sequences)
    if rejected is not None:
        weight = torch.where(rejected, 0.0, weight)
        stats["rejected_fraction"] = rejected.float()
    stats |= {"is_weight_mean": weight, "is_weight_sq_mean": weight.square()}
    return weight, stats


def kept_tokens(
    off_policy: OffPolicy,
    loss_mask: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    sequences: Sequences | None = None,
) -> Tensor:
    """Returns `loss_mask` without the tokens that `reject_level`, or an IS mask, leaves out.

    Args:
        loss_mask, old_log_probs, rollout_log_probs: [rows, S], whole sequences.
        sequences: for packed rows.

    Raises:
        ConfigError: `negative_max_kl` is set, which needs the current policy of every step.
    """
    if off_policy.negative_max_kl is not None:
        raise ConfigError("negative_max_kl rejects by the current policy; it cannot leave counts.")
    tensors = {
        name: torch.where(loss_mask, value.detach(), 0.0)
        for name, value in (
            ("old_log_probs", old_log_probs),
            ("rollout_log_probs", rollout_log_probs),
        )
    }
    sequences = sequences or Sequences(loss_mask)
    kept = loss_mask
    if off_policy.is_level in LEVELS and off_policy.is_outside == "mask":
        kept = kept & (_weights(off_policy, tensors, sequences)[1]["is_outside_fraction"] == 0)
    rejected = _rejected(off_policy, tensors, sequences)
    return kept if rejected is None else kept & ~rejected


def mismatch_stats(old_log_probs: Tensor, rollout_log_probs: Tensor) -> dict[str, Tensor]:
    """Returns per-token estimates of KL(rollout || old), nats: `mismatch_k1`, `mismatch_k3`.

    Formula: with x = old_log_probs - rollout_log_probs, k1 = -x and k3 = exp(x) - 1 - x, for
    tokens sampled from the rollout policy.
    """
    x = log_ratio(old_log_probs.detach(), rollout_log_probs)
    return {"mismatch_k1": -x, "mismatch_k3": bounded_exp(x) - 1.0 - x}


def _weights(
    off_policy: OffPolicy, tensors: Mapping[str, Tensor], sequences: Sequences
) -> tuple[Tensor, dict[str, Tensor]]:
    if off_policy.is_level is None:
        return torch.ones_like(tensors["log_probs"].detach()), {}
    if off_policy.is_level == "given":
        return tensors["rollout_is_weights"], {}
    rho = _ratio(off_policy.is_level, tensors, sequences)
    outside = (rho < off_policy.is_min) | (rho > off_policy.is_max)
    if off_policy.is_outside == "mask":
        rho = torch.where(outside, 0.0, rho)
    else:
        rho = rho.clamp(off_policy.is_min, off_policy.is_max)
    return rho, {"is_outside_fraction": outside.float()}


def _rejected(
    off_policy: OffPolicy, tensors: Mapping[str, Tensor], sequences: Sequences
) -> Tensor | None:
    rejected = None
    if off_policy.reject_level is not None:
        level = "token" if off_policy.reject_level == "any_token" else off_policy.reject_level
        rho = _ratio(level, tensors, sequences)
        rejected = (rho < off_policy.reject_min) | (rho > off_policy.reject_max)
        if off_policy.reject_level == "any_token":
            rejected = sequences.sum(rejected.float()) > 0
    if off_policy.negative_max_kl is not None:
        gap = log_ratio(tensors["rollout_log_probs"], tensors["log_probs"])
        left = sequences.mean(gap) > off_policy.negative_max_kl
        negative = left & (tensors["advantages"] < 0)
        rejected = negative if rejected is None else rejected | negative
    return rejected


def _ratio(level: str, tensors: Mapping[str, Tensor], sequences: Sequences) -> Tensor:
    log_rho = log_ratio(tensors["old_log_probs"].detach(), tensors["rollout_log_probs"])
    if level == "sequence":
        log_rho = sequences.sum(log_rho)
    if level == "geometric":
        log_rho = sequences.mean(log_rho)
    return bounded_exp(log_rho)


def _check_choice(name: str, value: str | None, known: tuple[str | None, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def _check_band(name: str, low: float, high: float) -> None:
    numbers = all(isinstance(x, (int, float)) for x in (low, high))
    if not numbers or not 0.0 <= low < high:
        raise ConfigError(
            f"{name}_min and {name}_max must be ratios with 0 <= min < max, got {low!r} and "
            f"{high!r}."
        )
