"""The losses by name. A loss is a pure function; its signature says what it needs.

    def my_loss(log_probs, old_log_probs, advantages, *, my_setting=0.2) -> TokenLoss

Positional parameters are tensors of the micro-batch, by their glossary names, all of one shape,
fp32, with masked positions already set to 0; only `log_probs` (and `entropy`) carry a gradient.
Two more may be asked for by name: `loss_mask`, bool, and `sequences` (`ops.sequences`), for sums
over whole sequences. A loss that asks for `token_log_probs`, [..., k], gets the current policy's
log-probs, with gradient, of the k tokens that the micro-batch names at each position
(`types.TOKEN_IDS_FIELD`). Keyword-only parameters are settings. The result is un-reduced: weights
come later, once.

To add a loss: write the function, add one line to `LOSSES`, one YAML under `configs/loss/`, one
test. Losses outside this package are named by import path, `"my_pkg.my_mod:fn"`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from ..types import PER_TOKEN_FLOAT_FIELDS, PER_TOKEN_SET_FIELDS, TOKEN_IDS_FIELD, TokenLoss
from .covariance import clip_cov, kl_cov
from .cross_entropy import cross_entropy
from .distillation import on_policy_distillation, top_k_forward_kl
from .policy import dual_clip, importance_sampling, policy_gradient, ppo_clip
from .sequence_level import gmpo, gspo, gspo_token, topr
from .tinker import tinker_cispo, tinker_dro, tinker_importance_sampling, tinker_ppo
from .trust_region import cispo, dppo_kl, dppo_tv, dro, sapo

# what the objective makes; all other positional parameters come from the micro-batch
MADE_BY_OBJECTIVE = ("log_probs", "token_log_probs", "entropy", "loss_mask", "sequences")
# what the micro-batch can have
_GIVEN = tuple(n for n in PER_TOKEN_FLOAT_FIELDS + PER_TOKEN_SET_FIELDS if n != TOKEN_IDS_FIELD)


@dataclass(frozen=True)
class LossSpec:
    """A loss function with what the forward step must know about it.

    Attributes:
        fn: the per-token loss.
        homogeneous: w * l(A) == l(w * A) for w >= 0, so advantages may carry the weight. A loss
            that is not homogeneous is refused without explicit `loss_weights`.
        depends_on_micro_batch: it ranks or averages over the micro-batch, so its gradient changes
            with the cut.
        token_level: unless it needs `sequences` or depends on the micro-batch, a token's loss
            depends on that token alone.
    """

    fn: Callable[..., TokenLoss | Tensor]
    homogeneous: bool = False
    depends_on_micro_batch: bool = False
    token_level: bool = True

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", str(self.fn))

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors the loss reads, in the order of its parameters."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in self._parameters() if p.kind in kinds)

    @property
    def reads_token_set(self) -> bool:
        """Whether it reads log-probs of given tokens, beside those of the labels."""
        return "token_log_probs" in self.needs

    @property
    def settings(self) -> dict[str, Any]:
        """Settings with their defaults (`inspect.Parameter.empty` where one must be given)."""
        return {
            p.name: p.default
            for p in self._parameters()
            if p.kind == inspect.Parameter.KEYWORD_ONLY
        }

    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.fn).parameters.values())


LOSSES: dict[str, LossSpec] = {
    "ppo_clip": LossSpec(ppo_clip, homogeneous=True),
    "dual_clip": LossSpec(dual_clip, homogeneous=True),
    "policy_gradient": LossSpec(policy_gradient, homogeneous=True),
    "importance_sampling": LossSpec(importance_sampling, homogeneous=True),
    "gspo": LossSpec(gspo, homogeneous=True),
    "gspo_token": LossSpec(gspo_token, homogeneous=True),
    "gmpo": LossSpec(gmpo, homogeneous=True),
    "topr": LossSpec(topr, homogeneous=True),
    "cispo": LossSpec(cispo, homogeneous=True),
    "sapo": LossSpec(sapo, homogeneous=True),
    "dro": LossSpec(dro),
    "dppo_tv": LossSpec(dppo_tv, homogeneous=True),
    "dppo_kl": LossSpec(dppo_kl, homogeneous=True),
    "clip_cov": LossSpec(clip_cov, depends_on_micro_batch=True),
    "kl_cov": LossSpec(kl_cov, depends_on_micro_batch=True),
    "tinker_importance_sampling": LossSpec(tinker_importance_sampling, homogeneous=True),
    "tinker_ppo": LossSpec(tinker_ppo, homogeneous=True),
    "tinker_cispo": LossSpec(tinker_cispo, homogeneous=True),
    "tinker_dro": LossSpec(tinker_dro),
    "on_policy_distillation": LossSpec(on_policy_distillation),
    "top_k_distillation": LossSpec(top_k_forward_kl),
    "cross_entropy": LossSpec(cross_entropy),
}


def loss_spec(loss: str | Callable[..., TokenLoss | Tensor]) -> LossSpec:
    """Returns the spec of a loss given by name, by import path or as a function.

    A loss from outside counts as homogeneous, and as made token by token, only if it says so:
    `fn.homogeneous = True`, `fn.token_level = True`.

    Raises:
        ConfigError: unknown name (the message lists the known ones) or import path.
    """
    if callable(loss):
        said = {name: getattr(loss, name, False) for name in ("homogeneous", "token_level")}
        return LossSpec(loss, **said)
    if not isinstance(loss, str):
        raise ConfigError(f"a loss is a name, an import path or a function, got {loss!r}.")
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
        loss = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import the loss {path!r}: {error}.") from error
    if not callable(loss):
        raise ConfigError(f"{path!r} is not a function but {type(loss).__name__}.")
    return loss


def check_settings(spec: LossSpec, settings: dict[str, Any]) -> None:
    """Raises `ConfigError` for tensors nobody has, and for settings the loss lacks or must get.

    Values are checked by the loss itself; `Objective` calls it once when it is made.
    """
    known_tensors = (*MADE_BY_OBJECTIVE, *_GIVEN)
    strange = [name for name in spec.needs if name not in known_tensors]
    if strange:
        raise ConfigError(
            f"loss {spec.name!r} has the positional parameter {', '.join(map(repr, strange))}; "
            f"tensors it can get: {', '.join(known_tensors)}. A setting must be keyword-only."
        )
    known = spec.settings
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigError(
            f"loss {spec.name!r} has no setting {', '.join(map(repr, unknown))}; "
            f"its settings: {', '.join(known) or 'none'}."
        )
    missing = [k for k, v in known.items() if v is inspect.Parameter.empty and k not in settings]
    if missing:
        raise ConfigError(f"loss {spec.name!r} needs the setting {', '.join(map(repr, missing))}.")
