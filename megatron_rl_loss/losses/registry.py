"""The losses by name. A loss is a pure function; its signature says which tensors it needs.

    def my_loss(log_probs, old_log_probs, advantages, *, my_setting=0.2) -> TokenLoss

Positional parameters are tensors of the micro-batch, by their glossary names, all of one shape,
fp32, with masked positions already set to 0; only `log_probs` (and `entropy`) carry a gradient.
Keyword-only parameters are settings. The result is un-reduced: weights come later, once.

To add a loss: write the function, add one line to `LOSSES`, one YAML under `configs/loss/`, one
test. Losses outside this package are named by import path, `"my_pkg.my_mod:fn"`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Callable

from torch import Tensor

from ..errors import ConfigError
from ..types import TokenLoss
from .cross_entropy import cross_entropy
from .policy import dual_clip, importance_sampling, policy_gradient, ppo_clip


@dataclass(frozen=True)
class LossSpec:
    """A loss function with what the forward step must know about it.

    Attributes:
        fn: the per-token loss.
        homogeneous: w * l(A) == l(w * A) for w >= 0, so advantages may carry the weight. A loss
            that is not homogeneous is refused without explicit `loss_weights`.
    """

    fn: Callable[..., TokenLoss | Tensor]
    homogeneous: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors the loss reads, `log_probs` first."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in self._parameters() if p.kind in kinds)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings with their defaults (`inspect.Parameter.empty` where one must be given)."""
        return {
            p.name: p.default for p in self._parameters() if p.kind == inspect.Parameter.KEYWORD_ONLY
        }

    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.fn).parameters.values())


LOSSES: dict[str, LossSpec] = {
    "ppo_clip": LossSpec(ppo_clip, homogeneous=True),
    "dual_clip": LossSpec(dual_clip, homogeneous=True),
    "policy_gradient": LossSpec(policy_gradient, homogeneous=True),
    "importance_sampling": LossSpec(importance_sampling, homogeneous=True),
    "cross_entropy": LossSpec(cross_entropy),
}


def loss_spec(loss: str | Callable[..., TokenLoss | Tensor]) -> LossSpec:
    """Returns the spec of a loss given by name, by import path or as a function.

    A loss from outside counts as homogeneous only if it says so: `fn.homogeneous = True`.

    Raises:
        ConfigError: unknown name (the message lists the known ones) or import path.
    """
    if callable(loss):
        return LossSpec(loss, homogeneous=getattr(loss, "homogeneous", False))
    if loss in LOSSES:
        return LOSSES[loss]
    if ":" in loss:
        return loss_spec(_import(loss))
    raise ConfigError(
        f"unknown loss {loss!r}; known: {', '.join(LOSSES)}; or an import path 'my_pkg.my_mod:fn'."
    )


def _import(path: str) -> Callable[..., TokenLoss | Tensor]:
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import the loss {path!r}: {error}.") from error


def check_settings(spec: LossSpec, settings: dict[str, Any]) -> None:
    """Raises `ConfigError` for settings the loss does not have, or lacks.

    Values are checked by the loss itself, on the first call or through `losses.checks`.
    """
    known = spec.settings
    name = getattr(spec.fn, "__name__", str(spec.fn))
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigError(
            f"loss {name!r} has no setting {', '.join(map(repr, unknown))}; "
            f"its settings: {', '.join(known) or 'none'}."
        )
    missing = [k for k, v in known.items() if v is inspect.Parameter.empty and k not in settings]
    if missing:
        raise ConfigError(f"loss {name!r} needs the setting {', '.join(map(repr, missing))}.")
