"""The audit's self-test: each known mistake, planted on the layout at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .audit_gradients import UnguardedStep
from .audit_run import Audit
from .audit_verdict import Finding, Sizes
from .groups import ParallelGroups
from .guard import model_config

MakeAudit = Callable[..., Audit]


@dataclass(frozen=True)
class Mistake:
    """A mistake to plant.

    Attributes:
        name: for the table.
        expected: what a finding must name.
        scale: (num_microbatches, dp_size, cp_size) -> what the loss is multiplied by.
        weights: see `weighted_as`.
        hook: of the schedule's config: "", "missing" or "twice".
        build: keyword arguments of a model that is built wrongly, unknown to the forward step.
        shows: whether this layout can show it.
    """

    name: str
    expected: str
    scale: Callable[[int, int, int], float] = lambda m, d, c: 1.0
    weights: str = ""
    hook: str = ""
    build: Mapping[str, Any] = field(default_factory=dict)
    shows: Callable[[Sizes], bool] = lambda sizes: True


def _has_dp(sizes: Sizes) -> bool:
    return sizes.dp > 1


def _has_cp(sizes: Sizes) -> bool:
    return sizes.cp > 1


MISTAKES = (
    Mistake("M forgotten", "num_microbatches", scale=lambda m, d, c: 1 / m),
    Mistake("M twice", "num_microbatches", scale=lambda m, d, c: m),
    Mistake("D forgotten", "dp_size", scale=lambda m, d, c: 1 / d, shows=_has_dp),
    Mistake("D twice", "dp_size", scale=lambda m, d, c: d, shows=_has_dp),
    Mistake("C in the factor", "cp_size", scale=lambda m, d, c: c, shows=_has_cp),
    Mistake("C divided out", "cp_size", scale=lambda m, d, c: 1 / c, shows=_has_cp),
    Mistake(
        "flag on",
        "calculate_per_token_loss",
        build={"calculate_per_token_loss": True},
        shows=lambda sizes: sizes.dp * sizes.cp > 1,
    ),
    Mistake(
        "experts unmarked",
        "expert ranks",
        build={"mark_experts": False},
        shows=lambda sizes: sizes.experts_apart,
    ),
    Mistake("hook missing", "finalize missing", hook="missing", shows=lambda s: s.world > 1),
    Mistake("finalized twice", "finalize twice", hook="twice"),
    Mistake("counts of one rank", "local counts", weights="local counts", shows=_has_dp),
    Mistake("mean per micro-batch", "micro-batch mean", weights="micro-batch mean"),
    Mistake("weights ignored", "loss_weights ignored", weights="loss_weights ignored"),
)


def plant(mistake: Mistake, audit: Audit, make_audit: MakeAudit) -> list[Finding]:
    """Returns the audit's findings with the mistake planted.

    Args:
        audit: of the right set-up; it is left as it was.
        make_audit: builds the same audit, with a mistake's `build`.
    """
    if mistake.build:
        audit = make_audit(**mistake.build)
    step = ScaledStep(audit, mistake.scale)
    with _hook(audit, mistake.hook):
        return audit.run(step, mistake.weights)[1]


class ScaledStep:
    """Our forward step without its guard, with a loss that is scaled wrongly."""

    def __init__(self, audit: Audit, scale: Callable[[int, int, int], float]) -> None:
        self._step = UnguardedStep(audit.reference_step)
        self._groups: ParallelGroups = audit.groups
        self._scale = scale

    def __call__(self, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        scale = self._scale(
            data_iterator.num_microbatches, self._groups.dp.size(), self._groups.cp.size()
        )
        output, loss = self._step(data_iterator, model)
        return output, partial(_scaled, loss, scale)


def _scaled(loss: Callable[..., Any], scale: float, logits: Any) -> tuple[Any, Any]:
    value, metrics = loss(logits)
    return value * scale, metrics


@contextmanager
def _hook(audit: Audit, kind: str) -> Iterator[None]:
    config = model_config(audit.chunks[0])
    kept = config.finalize_model_grads_func

    def twice(*args: Any, **kwargs: Any) -> None:
        kept(*args, **kwargs)
        kept(*args, **kwargs)

    config.finalize_model_grads_func = {"": kept, "missing": None, "twice": twice}[kind]
    try:
        yield
    finally:
        config.finalize_model_grads_func = kept
