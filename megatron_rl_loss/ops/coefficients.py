"""Coefficients that follow a measured quantity, updated once per optimizer step.

Give the new value to the objective of the next step:
`forward_step.objective = dataclasses.replace(forward_step.objective, kl_coef=coef.value)`.
The measured values are the step's reduced metrics, the same on every rank, so all ranks agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass
class AdaptiveKLCoef:
    """Keeps the KL to the reference near a target.

    Formula: e = clip(kl / target - 1, -0.2, 0.2); value *= 1 + e min(num_sequences / horizon, 1).
    The bound is ours: a mini-batch of more than 5 horizons would make the value negative.

    Attributes:
        value: the coefficient now, > 0.
        target: nats, > 0.
        horizon: sequences; how slowly it reacts.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), sec. 2.2.
    """

    value: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("value", "target", "horizon"):
            _check(f"{name} of AdaptiveKLCoef", getattr(self, name), above=0.0)

    def update(self, kl: float, *, num_sequences: int) -> float:
        """Returns the new coefficient after a step with the mean KL `kl`, nats per token."""
        _check("kl", kl)
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(num_sequences / self.horizon, 1.0)
        return self.value


@dataclass
class AdaptiveEntropyCoef:
    """Rewards entropy only while it is below a target, and more the longer it stays there.

    Formula: inner += step if entropy < target, else inner -= step, kept in [0, coef_max];
    value = inner if entropy < target, else 0.

    Attributes:
        inner: the remembered coefficient, in [0, coef_max].
        target: nats, > 0.
        step: change per update, > 0.
        coef_max: upper bound.

    Source: He et al., "Skywork Open Reasoner 1" (2025), adaptive entropy control.
    """

    inner: float
    target: float
    step: float = 0.005
    coef_max: float = 1.0
    value: float = 0.0

    def __post_init__(self) -> None:
        for name in ("target", "step", "coef_max"):
            _check(f"{name} of AdaptiveEntropyCoef", getattr(self, name), above=0.0)
        if not 0.0 <= self.inner <= self.coef_max:
            raise ConfigError(f"inner must be in [0, coef_max={self.coef_max}], got {self.inner}.")

    def update(self, entropy: float) -> float:
        """Returns the coefficient of the next step after one with the mean `entropy`, nats."""
        _check("entropy", entropy)
        low = entropy < self.target
        self.inner += self.step if low else -self.step
        self.inner = min(max(self.inner, 0.0), self.coef_max)
        self.value = self.inner if low else 0.0
        return self.value


def _check(name: str, value: float, *, above: float = -math.inf) -> None:
    if not math.isfinite(value) or not value > above:
        bound = "" if above == -math.inf else f" and > {above}"
        raise ConfigError(f"{name} must be finite{bound}, got {value}.")
