"""From two gradients to a factor per kind of parameter, the same numbers on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .audit_gradients import Gradients, data_group, is_expert, trained_parameters
from .groups import ParallelGroups

KINDS = ("dense", "embedding", "norm", "router", "expert", "adapter", "expert adapter")
_TINY = 1e-30


class Factor(NamedTuple):
    """How a gradient g compares with the reference r, over all parameters of a kind.

    Attributes:
        factor: <g, r> / <r, r>, the least-squares factor; 1 is right.
        residual: |g - factor r| / |r|, what no factor explains.
        data_spread: how far the ranks that share a parameter over data are apart, |g - mean| / |r|.
        tensor_spread: the same for tensor-parallel copies of a parameter.
    """

    factor: float
    residual: float
    data_spread: float
    tensor_spread: float


def parameter_kind(name: str, parameter: Any) -> str:
    """Returns the kind of a parameter, one of `KINDS`.

    >>> parameter_kind("module.decoder.layers.0.mlp.router.weight", None)
    'router'
    """
    if "adapter" in name or "lora" in name:
        return "expert adapter" if ".experts." in name else "adapter"
    if ".experts." in name:
        return "expert"
    if "router" in name:
        return "router"
    if "embedding" in name or "output_layer" in name:
        return "embedding"
    return "norm" if "norm" in name else "dense"


def factors(
    chunks: Sequence[Any], gradients: Gradients, reference: Gradients, groups: ParallelGroups
) -> dict[str, Factor]:
    """Returns the factor of each kind that the model has (on any rank).

    Communicates: two all-reduces per parameter and a small one over all ranks.
    """
    sums = torch.zeros(len(KINDS), 5, dtype=torch.float64)
    named = list(trained_parameters(chunks))
    for (name, parameter), g, r in zip(named, gradients, reference, strict=True):
        sums[KINDS.index(parameter_kind(name, parameter))] += _sums(name, parameter, g, r, groups)
    device = gradients[0].device if gradients else torch.device("cpu")
    sums = sums.to(device)
    dist.all_reduce(sums)
    rows = dict(zip(KINDS, sums.tolist()))
    return {kind: _factor(*row) for kind, row in rows.items() if row[1] > _TINY}


def _sums(name: str, parameter: Any, g: Tensor, r: Tensor, groups: ParallelGroups) -> Tensor:
    g, r = g.double().flatten(), r.double().flatten()
    is_copy = not getattr(parameter, "tensor_model_parallel", False)
    data = _distance_from_mean(g, data_group(name, parameter))
    may_differ = not is_copy or is_expert(name, parameter)
    tensor = 0.0 if may_differ else _distance_from_mean(g, groups.tp)
    return torch.tensor([g @ r, r @ r, g @ g, data, tensor], dtype=torch.float64)


def _distance_from_mean(g: Tensor, group: dist.ProcessGroup) -> float:
    if group.size() == 1:
        return 0.0
    mean = g.clone()
    dist.all_reduce(mean, group=group)
    return float((g - mean / group.size()).pow(2).sum())


def _factor(gr: float, rr: float, gg: float, data: float, tensor: float) -> Factor:
    factor = gr / rr
    rest = gg - factor * gr
    residual = math.sqrt((0.0 if rest < 0.0 else rest) / rr)  # NaN stays
    return Factor(factor, residual, math.sqrt(data / rr), math.sqrt(tensor / rr))
