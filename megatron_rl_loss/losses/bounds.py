"""Checks of the losses' settings, with messages that say what the number means."""

from __future__ import annotations

from ..errors import ConfigError


def check_clip_offsets(low: float, high: float) -> None:
    """Raises `ConfigError` unless low and high are offsets from ratio 1, not absolute ratios."""
    if not 0.0 <= low <= 0.5:
        raise ConfigError(
            f"clip_ratio_low must be in [0, 0.5], got {low}: it is an offset from 1 (0.2 clips at "
            "0.8); an absolute threshold t is given as 1 - t."
        )
    if not 0.0 <= high < 1.0:
        raise ConfigError(
            f"clip_ratio_high must be in [0, 1), got {high}: it is an offset from 1 (0.2 clips "
            "at 1.2); an absolute threshold t is given as t - 1."
        )


def check_thresholds(low: float, high: float) -> None:
    """Raises `ConfigError` unless 0 <= low <= 1 <= high: absolute ratios."""
    if not 0.0 <= low <= 1.0 <= high < float("inf"):
        raise ConfigError(
            f"thresholds must be absolute ratios with 0 <= low <= 1 <= high (usual: 0.8 and 1.2), "
            f"got {low} and {high}; an offset x from 1 is given as 1 - x and 1 + x."
        )


def check_positive(name: str, value: float) -> None:
    """Raises `ConfigError` unless `value` is finite and > 0."""
    if not isinstance(value, (int, float)) or not 0.0 < value < float("inf"):
        raise ConfigError(f"{name} must be a number, finite and > 0, got {value!r}.")


def check_fraction(name: str, value: float) -> None:
    """Raises `ConfigError` unless 0 < value <= 1."""
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{name} must be in (0, 1], got {value}.")
