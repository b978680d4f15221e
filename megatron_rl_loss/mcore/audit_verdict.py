"""Names what is wrong from measured factors; plain arithmetic, no ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .audit_factors import Factor

HYPOTHESES = ("local counts", "micro-batch mean", "loss_weights ignored")

_HYPOTHESIS_TEXTS = {
    "local counts": "the weights are made from the counts of one data-parallel rank; pass the "
    "data-parallel group (dp_group=...) to the function that makes them, so that it counts the "
    "whole mini-batch",
    "micro-batch mean": "the loss is a mean over each micro-batch; it must be the sum of "
    "loss_weights * token_loss, with weights of the whole mini-batch",
    "loss_weights ignored": "loss_weights are not used: every trained token has weight 1",
}
_POWER_TEXTS = {
    ("num_microbatches", -1): "the schedule divides the loss by num_microbatches, and nothing "
    "multiplies it by num_microbatches of this call",
    ("num_microbatches", 1): "the loss is multiplied by num_microbatches once too often",
    ("dp_size", -1): "DDP averages over data-parallel ranks, and nothing multiplies the loss by "
    "dp_size",
    ("dp_size", 1): "the loss is multiplied by dp_size once too often, or gradients are summed "
    "instead of averaged (calculate_per_token_loss)",
    ("cp_size", -1): "the loss is divided by cp_size (context_parallel_size); the schedule's "
    "factor cp_size and DDP's mean over dp * cp ranks cancel already",
    ("cp_size", 1): "the loss is multiplied by cp_size (context_parallel_size) once too often: "
    "dp_size in the factor must leave context parallelism out; or a gather over context-parallel "
    "ranks all-reduces in backward",
}
_OF_EXPERTS = {"expert", "expert adapter"}
_EXPERT_TEXT = (
    "only the experts' gradients are wrong: they are reduced over other ranks than those that hold "
    "copies of an expert; before DDP is built, each expert's parameter must have allreduce=False"
)
_FLAG_TEXT = (
    "gradients are summed over data- and context-parallel ranks instead of averaged: "
    "calculate_per_token_loss is on"
)


class Sizes(NamedTuple):
    """The sizes that a factor can be made of.

    Attributes:
        dp: dp_size, without context parallelism.
        cp: cp_size.
        world: all ranks.
        experts_apart: experts are reduced over other ranks than the rest that is trained.
    """

    dp: int
    cp: int
    world: int
    experts_apart: bool = False


class Cut(NamedTuple):
    """What was measured with one cut of the probe.

    Attributes:
        name: for the table.
        num_microbatches: of its forward_backward call.
        factors: by kind of parameter, against the contract.
        num_reductions: how often DDP reduced the gradients.
        fits: by hypothesis, against the gradient under its weights; empty if all is right.
    """

    name: str
    num_microbatches: int
    factors: Mapping[str, Factor]
    num_reductions: int
    fits: Mapping[str, Mapping[str, Factor]] = {}


class Finding(NamedTuple):
    """One thing that is wrong: the mistakes that would explain it (one is enough), and words."""

    mistakes: tuple[str, ...]
    text: str


def is_right(factor: Factor, tolerance: float) -> bool:
    """Tells whether a measured factor is 1, and explains the whole gradient on every rank."""
    return abs(factor.factor - 1.0) <= tolerance and _is_clean(factor, tolerance)


def findings(cuts: Sequence[Cut], sizes: Sizes, tolerance: float) -> list[Finding]:
    """Returns what is wrong, an empty list if nothing is."""
    found = _reductions(cuts, sizes)
    if all(is_right(f, tolerance) for cut in cuts for f in cut.factors.values()):
        return found
    if not found:
        found = _no_gradient(cuts)
    if not found:
        found = _expert_ranks(cuts, sizes, tolerance) or _spreads(cuts, tolerance)
    if not found:
        found = _explained(cuts, sizes, tolerance)
    return found or [_unexplained(cuts, tolerance)]


def _reductions(cuts: Sequence[Cut], sizes: Sizes) -> list[Finding]:
    counts = [cut.num_reductions for cut in cuts]
    if max(counts) > 1:
        text = (
            f"gradients are reduced {max(counts)} times in one step: finalize_model_grads runs in "
            "the schedule (config.finalize_model_grads_func) and once more elsewhere; drop one"
        )
        return [Finding(("finalize twice",), text)]
    if min(counts) == 0 and sizes.world > 1:
        text = (
            "gradients are not reduced: the schedule's config has no finalize_model_grads_func "
            "that reduces; set it to megatron.core.distributed.finalize_model_grads"
        )
        return [Finding(("finalize missing",), text)]
    return []


def _no_gradient(cuts: Sequence[Cut]) -> list[Finding]:
    factors = [f for cut in cuts for f in cut.factors.values()]
    if not all(math.isfinite(x) for f in factors for x in f):
        return [Finding(("not finite",), "the gradient has NaN or inf; look at the loss")]
    if not any(f.factor or f.residual for f in factors):
        return [Finding(("no gradient",), "the gradient is zero: the loss is detached or masked")]
    return []


def _expert_ranks(cuts: Sequence[Cut], sizes: Sizes, tolerance: float) -> list[Finding]:
    experts = {kind for cut in cuts for kind in cut.factors if kind in _OF_EXPERTS}
    if not sizes.experts_apart or set(_wrong_kinds(cuts, tolerance)) != experts:
        return []
    return [Finding(("expert ranks",), _EXPERT_TEXT)]


def _wrong_kinds(cuts: Sequence[Cut], tolerance: float) -> list[str]:
    return sorted({k for cut in cuts for k, f in cut.factors.items() if not is_right(f, tolerance)})


def _spreads(cuts: Sequence[Cut], tolerance: float) -> list[Finding]:
    found = []
    data, tensor = (
        sorted({k for cut in cuts for k, f in cut.factors.items() if f[i] > tolerance})
        for i in (2, 3)
    )
    if data:
        text = f"data-parallel ranks have different gradients of {', '.join(data)} parameters"
        found.append(Finding(("ranks differ",), text))
    if tensor:
        text = (
            f"tensor-parallel ranks have different gradients of {', '.join(tensor)} parameters "
            "that they hold copies of: under sequence parallelism a weight lacks its "
            "sequence_parallel tag"
        )
        found.append(Finding(("copies differ",), text))
    return found


def _explained(cuts: Sequence[Cut], sizes: Sizes, tolerance: float) -> list[Finding]:
    values = [_common(cut.factors, tolerance) for cut in cuts]
    factors = [v for v in values if v is not None]
    one_factor = len(factors) == len(cuts)
    # under token_mean, weight 1 for every token is a constant factor too: name the weights
    return (
        (one_factor and _powers(cuts, factors, sizes, tolerance))
        or _hypothesis(cuts, sizes, tolerance)
        or (one_factor and _constant(factors, tolerance))
        or []
    )


def _hypothesis(cuts: Sequence[Cut], sizes: Sizes, tolerance: float) -> list[Finding]:
    """Finds the first hypothesis that explains every cut, up to a power of the sizes."""
    # a cut that is right fits every mistake that makes no difference in it
    wrong = [cut for cut in cuts if cut.fits]
    for mistake in HYPOTHESES:
        if mistake == "local counts" and sizes.dp == 1:
            continue  # they are the counts of the whole mini-batch
        fits = [_common(cut.fits.get(mistake, {}), tolerance) for cut in wrong]
        factors = [f for f in fits if f is not None]
        if factors and len(factors) == len(fits) and _matches(wrong, factors, sizes, tolerance):
            return [Finding((mistake,), _HYPOTHESIS_TEXTS[mistake])]
    return []


def _constant(factors: Sequence[float], tolerance: float) -> list[Finding]:
    first = factors[0]
    if not all(math.isclose(first, x, rel_tol=2 * tolerance) for x in factors):
        return []
    text = (
        f"every gradient is {first:.4g} times the right one, however the mini-batch is cut: the "
        "loss has another sign or is multiplied by a constant"
    )
    return [Finding(("constant factor",), text)]


def _common(factors: Mapping[str, Factor], tolerance: float) -> float | None:
    """Returns the factor that all kinds share, None if they share none."""
    if not factors or not all(_is_clean(f, tolerance * abs(f.factor)) for f in factors.values()):
        return None
    values = [f.factor for f in factors.values()]
    middle = sum(values) / len(values)
    return middle if max(values) - min(values) <= 2 * tolerance * abs(middle) else None


def _is_clean(factor: Factor, tolerance: float) -> bool:
    return max(factor.residual, factor.data_spread, factor.tensor_spread) <= tolerance


def _powers(
    cuts: Sequence[Cut], values: Sequence[float], sizes: Sizes, tolerance: float
) -> list[Finding]:
    """Finds the simplest M^a D^b C^c that all cuts agree with; several if equally simple."""
    matches = _matches(cuts, values, sizes, tolerance)
    if not matches:
        return []
    fewest = min(sum(map(abs, m)) for m in matches)
    best = [m for m in matches if sum(map(abs, m)) == fewest]
    names = tuple(dict.fromkeys(name for m in best for name in _mistakes(m, sizes)))
    return [Finding(names, "; or ".join(_power_text(m) for m in best))]


def _matches(
    cuts: Sequence[Cut], values: Sequence[float], sizes: Sizes, tolerance: float
) -> list[tuple[int, int, int]]:
    """Returns every (a, b, c) for which each cut's value is its M^a D^b C^c."""
    return [
        (a, b, c)
        for a, b, c in itertools.product(range(-2, 3), repeat=3)
        if not (b and sizes.dp == 1) and not (c and sizes.cp == 1)
        if all(
            math.isclose(v, cut.num_microbatches**a * sizes.dp**b * sizes.cp**c, rel_tol=tolerance)
            for cut, v in zip(cuts, values)
        )
    ]


def _mistakes(match: tuple[int, int, int], sizes: Sizes) -> list[str]:
    names = [n for n, e in zip(("num_microbatches", "dp_size", "cp_size"), match) if e]
    flag = (0, int(sizes.dp > 1), int(sizes.cp > 1))
    return names + (["calculate_per_token_loss"] if match == flag else [])


def _power_text(match: tuple[int, int, int]) -> str:
    if match == (0, 1, 1):
        return _FLAG_TEXT
    parts = []
    for name, exponent in zip(("num_microbatches", "dp_size", "cp_size"), match):
        if exponent:
            times = "" if abs(exponent) == 1 else " (squared)"
            parts.append(_POWER_TEXTS[name, int(math.copysign(1, exponent))] + times)
    return " and ".join(parts)


def _unexplained(cuts: Sequence[Cut], tolerance: float) -> Finding:
    wrong = ", ".join(_wrong_kinds(cuts, tolerance))
    text = (
        f"the gradients of {wrong} parameters are wrong in a way that no known mistake "
        "explains; compare the cuts in the table"
    )
    return Finding(("unexplained",), text)
