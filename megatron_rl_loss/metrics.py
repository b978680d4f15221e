"""Metrics that mean the same in every layout.

Each metric of a micro-batch is a [numerator, denominator] pair, fp32, and is divided once, after
both were summed over micro-batches and ranks: never a mean of means. This is also what Megatron's
`pretrain()` does with a two-element entry of the loss dict. Two kinds need more:

* names in `SUM_METRICS` are sums over the mini-batch (the loss and its terms). Their denominator
  is this micro-batch's share, 1 / (M * D * C), so that a plain division gives the sum too;
* names that end in `_max` or `_min` are one-element tensors.

A mean or extreme over no token at all is reported as 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ContractError, InputError
from .ops.precision import at_least_fp32

SUM_METRICS = ("loss", "policy_loss", "kl_loss", "entropy_loss", "num_tokens")

MetricTensors = dict[str, Tensor]


def mean_pair(values: Tensor, mask: Tensor) -> Tensor:
    """Returns [sum of `values` where `mask`, number of True], fp32 (fp64 for fp64), constant.

    >>> mean_pair(torch.tensor([2.0, float("nan")]), torch.tensor([True, False]))
    tensor([2., 1.])
    """
    total = torch.where(mask, at_least_fp32(values.detach()), 0.0).sum()
    return torch.stack([total, mask.sum().to(total.dtype)])


def sum_pair(total: Tensor, share: float) -> Tensor:
    """Returns [total, share] for a sum metric, as a copy: Megatron scales the loss in place."""
    value = at_least_fp32(total.detach())
    return torch.stack([value, value.new_tensor(share)])


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest value where `mask` as [1], -inf if there is none; constant."""
    return torch.where(mask, at_least_fp32(values.detach()), -torch.inf).amax().reshape(1)


def reduce_metrics(
    micro_batch_metrics: Sequence[Mapping[str, Tensor]],
    *,
    dp_cp_group: dist.ProcessGroup | None = None,
    num_calls: int = 1,
) -> dict[str, float]:
    """Returns the metrics of a mini-batch, the same floats on every rank of the group.

    Args:
        micro_batch_metrics: what the schedule returned: one dict per micro-batch of this rank, on
            a last pipeline stage. Every rank must have at least one, with the same keys.
        dp_cp_group: data-parallel group with context parallelism (not TP or PP: those ranks hold
            copies).
        num_calls: forward_backward calls that `micro_batch_metrics` covers.

    Raises:
        ContractError: no micro-batch ran, or the shares of the loss do not add up to `num_calls`:
            then the schedule ran another number of micro-batches than the factor was made for.
            Or micro-batches or ranks report different metrics.
        InputError: the loss is not finite. Call this before the optimizer step.

    Communicates: two MAX and one SUM all-reduce over `dp_cp_group`, all small.
    """
    if not micro_batch_metrics:
        raise ContractError(
            "the schedule returned no metrics; call reduce_metrics on the last pipeline stage, "
            "after a call with at least one micro-batch."
        )
    names = _names(micro_batch_metrics, dp_cp_group)
    pairs = [name for name in names if not name.endswith(("_max", "_min"))]
    extremes = [name for name in names if name.endswith(("_max", "_min"))]
    sums = _sum_pairs(micro_batch_metrics, pairs)
    tops = _maxima(micro_batch_metrics, extremes)
    if dp_cp_group is not None:
        dist.all_reduce(sums, group=dp_cp_group)
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=dp_cp_group)
    metrics = dict(zip(pairs, _divide(pairs, sums.tolist(), num_calls)))
    for name, top in zip(extremes, tops.tolist()):
        metrics[name] = 0.0 if top == -torch.inf else _signed(name, top)
    _check_loss_is_finite(metrics)
    return metrics | _ratios_of_means(metrics)


def _names(
    micro_batches: Sequence[Mapping[str, Tensor]], group: dist.ProcessGroup | None
) -> list[str]:
    """Returns the metrics' names, the same in every micro-batch and on every rank."""
    names = {tuple(sorted(metrics)) for metrics in micro_batches}
    code = zlib.crc32(repr(sorted(names)).encode())
    device = next(iter(micro_batches[0].values())).device
    ends = torch.tensor([code, -code], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if len(names) > 1 or float(ends.sum()):
        raise ContractError(
            "the micro-batches (here or on another rank) do not all report the same metrics; here: "
            f"{'; or '.join(', '.join(each) for each in sorted(names))}. Give every micro-batch "
            "of the mini-batch the same optional fields (ref_log_probs, rollout_log_probs, ...)."
        )
    return list(names.pop())


def _check_loss_is_finite(metrics: Mapping[str, float]) -> None:
    if not math.isfinite(metrics.get("loss", 0.0)):
        raise InputError(
            f"the loss is {metrics['loss']}: the model's log-probs are not finite at a trained "
            "position. No weight was changed. Look for NaN in the weights, a learning rate that is "
            "too high, or rollouts from another model."
        )


def _ratios_of_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that are made of reduced means: a mean of them would mean nothing.

    is_ess: effective share of the tokens under importance weights, (mean w)^2 / mean w^2.
    explained_variance: of the returns, by the critic, 1 - var(R - V) / var(R).
    """
    made = {}
    if "is_weight_sq_mean" in metrics:
        square = metrics["is_weight_sq_mean"]
        made["is_ess"] = metrics["is_weight_mean"] ** 2 / square if square else 0.0
    if "value_error_sq_mean" in metrics:
        error = metrics["value_error_sq_mean"] - metrics["value_error_mean"] ** 2
        spread = metrics["return_sq_mean"] - metrics["return_mean"] ** 2
        made["explained_variance"] = 1.0 - error / spread if spread > 0.0 else 0.0
    return made


def _sum_pairs(micro_batches: Sequence[Mapping[str, Tensor]], names: list[str]) -> Tensor:
    device = next(iter(micro_batches[0].values())).device
    if not names:
        return torch.zeros(0, 2, dtype=torch.float64, device=device)
    pairs = [torch.stack([m[name].double() for name in names]) for m in micro_batches]
    return torch.stack(pairs).sum(dim=0)


def _maxima(micro_batches: Sequence[Mapping[str, Tensor]], names: list[str]) -> Tensor:
    device = next(iter(micro_batches[0].values())).device
    tops = torch.full((len(names),), -torch.inf, dtype=torch.float64, device=device)
    for m in micro_batches:
        for i, name in enumerate(names):
            tops[i] = torch.maximum(tops[i], _signed(name, m[name].double().squeeze()))
    return tops


def _signed(name: str, value: Any) -> Any:
    """Turns a minimum into a maximum and back, so that one MAX reduces both."""
    return -value if name.endswith("_min") else value


def _divide(names: list[str], sums: list[list[float]], num_calls: int) -> list[float]:
    values = []
    for name, (numerator, denominator) in zip(names, sums):
        if name in SUM_METRICS:
            _check_shares(name, denominator, num_calls)
            denominator = 1.0
        values.append(numerator / denominator if denominator else 0.0)
    return values


def _check_shares(name: str, shares: float, num_calls: int) -> None:
    if abs(shares - num_calls) > 1e-3 * num_calls:
        raise ContractError(
            f"the micro-batches' shares of {name!r} add up to {shares:.4g}, expected {num_calls}: "
            "the schedule ran another number of micro-batches (or data-parallel ranks) than the "
            "loss was scaled for. Give make_forward_step the num_microbatches of each call, as a "
            "function or through its data iterator, instead of a fixed number."
        )
