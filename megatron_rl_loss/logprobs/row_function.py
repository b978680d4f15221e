"""The autograd function behind every log-prob from logits: one read forward, one write backward.

Forward keeps the logits themselves and vectors with one entry per row, nothing of size [N, V].
Backward reads each logit once and writes its gradient, in place where that is safe.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from .inputs import RowLayout, VocabShard, logit_rows
from .ownership import calibrate, may_overwrite
from .rows_eager import LOWEST, compute_dtype


class RowPlan(NamedTuple):
    """How one call runs; constant.

    Attributes:
        layout: how [..., V] is read as rows.
        shard: the columns of this rank.
        inv_temperature: 1 / T.
        with_entropy: whether the entropy is wanted.
        inplace_backward: True, False, or None: overwrite the logits if nobody else owns them.
        rows: the backend, a module with `row_statistics` and `write_row_gradients`.
    """

    layout: RowLayout
    shard: VocabShard
    inv_temperature: float
    with_entropy: bool
    inplace_backward: bool | None
    rows: ModuleType


class Softmax(NamedTuple):
    """Statistics of whole rows, [N] each: z's maximum, log sum exp((z - m) / T), entropy."""

    m: Tensor
    log_s: Tensor
    entropy: Tensor | None


class ShardIds(NamedTuple):
    """Token ids [N, K] as seen by a shard: ids, columns (clamped), who is here, who exists."""

    ids: Tensor
    columns: Tensor
    here: Tensor
    exists: Tensor


def shard_ids(ids: Tensor, shard: VocabShard, num_columns: int) -> ShardIds:
    """Splits global token ids [N, K] into the ones this shard holds and the rest."""
    local = ids - shard.start
    here = (local >= 0) & (local < shard.num_valid)
    exists = (ids >= 0) & (ids < shard.vocab_size)
    return ShardIds(ids, local.clamp(0, num_columns - 1), here, exists)


def reduce_statistics(
    m: Tensor, s: Tensor, t: Tensor | None, z_ids: Tensor, inv_temperature: float, group: Any
) -> tuple[Softmax, Tensor]:
    """Joins the shards' statistics into those of whole rows, and sums the ids' logits.

    Args:
        m, s, t: [N] statistics of this shard, see `rows_eager.row_statistics`.
        z_ids: [N, K] logits of the wanted ids, 0 where another shard holds them.

    Communicates: one all-reduce MAX of [N] and one all-reduce SUM of [2 + K, N] (1 + K without
        entropy), none where `group` is None.
    """
    if group is not None:
        shard_m, m = m, m.clone()
        dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
        shift = ((shard_m - m) * inv_temperature).clamp(min=LOWEST)
        scale = shift.exp()
        t = None if t is None else (t + s * shift) * scale
        packed = torch.cat([(s * scale)[None], z_ids.t()] + ([] if t is None else [t[None]]))
        dist.all_reduce(packed, group=group)
        s, z_ids = packed[0], packed[1 : 1 + z_ids.shape[1]].t()
        t = None if t is None else packed[-1]
    log_s = s.log()
    return Softmax(m, log_s, None if t is None else log_s - t / s), z_ids


def id_log_probs(softmax: Softmax, z_ids: Tensor, exists: Tensor, inv_temperature: float) -> Tensor:
    """[N, K] log-probs of ids; NaN where the id is not in the vocabulary."""
    log_probs = (z_ids - softmax.m[:, None]) * inv_temperature - softmax.log_s[:, None]
    return log_probs.masked_fill(~exists, torch.nan)


def write_gradients(
    z: Tensor,
    out: Tensor,
    softmax: Softmax,
    ids: ShardIds,
    log_probs: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    plan: RowPlan,
) -> None:
    """Writes the gradient of one shard's logits to `out` (which may be `z`); talks to nobody.

    Formula: dz_j = [sum_k g_k (1{j = id_k} - p_j) - h p_j (log p_j + H)] / T, with g and h the
    gradients that arrive for log-probs and entropy. Exact 0 for padding columns and for rows
    with g = h = 0, whatever the row holds.
    """
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(log_probs)
    grad_log_probs = grad_log_probs * plan.inv_temperature
    # a label that does not exist has no gradient: let it be seen unless nothing trains on it
    grad_log_probs = grad_log_probs.masked_fill(~ids.exists & (grad_log_probs != 0), torch.nan)
    a, b = -grad_log_probs.sum(1), None
    if grad_entropy is not None:
        b = -grad_entropy * plan.inv_temperature
        a = torch.where(b == 0, a, a + b * softmax.entropy)
    valid = plan.shard.num_valid
    plan.rows.write_row_gradients(
        z[:, :valid], out[:, :valid], softmax.m, softmax.log_s, plan.inv_temperature, a, b
    )
    out[:, valid:].zero_()
    if valid:
        _write_id_gradients(out, ids, log_probs, grad_log_probs, a, b)


def _write_id_gradients(
    out: Tensor, ids: ShardIds, log_probs: Tensor, grad: Tensor, a: Tensor, b: Tensor | None
) -> None:
    """Stores the ids' own entries, computed in fp32 and rounded once.

    One id after the other: a column may be wanted twice, and a `scatter_` on CPU bf16 would
    allocate 4 bytes per element of `out`, which `index_put_` does not.
    """
    row_numbers = torch.arange(out.shape[0], device=out.device)
    for k in range(ids.ids.shape[1]):
        log_p = log_probs[:, k].clamp(min=LOWEST)
        coef = a if b is None else a + b * log_p
        same = ids.ids == ids.ids[:, k : k + 1]
        g = torch.where(same, grad, 0).sum(1)
        value = log_probs[:, k].exp() * coef + g
        idle = (a == 0) & (g == 0) if b is None else (a == 0) & (g == 0) & (b == 0)
        value = value.masked_fill(idle, 0).to(out.dtype)
        position = (row_numbers, ids.columns[:, k])
        out.index_put_(position, torch.where(ids.here[:, k], value, out[position]))


class RowLogProbs(torch.autograd.Function):
    """(logits [..., V], ids [N, K], plan) -> (log_probs [N, K], entropy [N] or None, m, z_ids)."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, plan: RowPlan):
        z = logit_rows(logits, plan.layout)
        m, s, t = plan.rows.row_statistics(
            z[:, : plan.shard.num_valid], plan.inv_temperature, plan.with_entropy
        )
        local = shard_ids(ids, plan.shard, z.shape[1])
        z_ids = z.gather(1, local.columns).to(compute_dtype(z.dtype)).masked_fill(~local.here, 0)
        softmax, z_ids = reduce_statistics(m, s, t, z_ids, plan.inv_temperature, plan.shard.group)
        log_probs = id_log_probs(softmax, z_ids, local.exists, plan.inv_temperature)
        ctx.save_for_backward(logits, ids, *softmax, z_ids)
        ctx.plan, ctx.overwritten = plan, False
        ctx.set_materialize_grads(False)
        if plan.inplace_backward is None and ctx.needs_input_grad[0]:
            calibrate()
        is_top = z_ids >= softmax.m[:, None]
        ctx.mark_non_differentiable(is_top)
        entropy = None if softmax.entropy is None else softmax.entropy.clone()
        return log_probs, entropy, is_top

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _):
        if ctx.overwritten:
            raise InputError(
                "backward ran twice through log-probs whose logits the first run overwrote with "
                "their gradient; pass inplace_backward=False (or None) to keep them."
            )
        if torch.is_grad_enabled():  # create_graph=True: this gradient would count as a constant
            raise InputError(
                "log-probs have no second derivative here; call backward without create_graph, or "
                "take torch.log_softmax for that term."
            )
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None
        logits, ids, m, log_s, entropy, z_ids = ctx.saved_tensors
        inplace = ctx.plan.inplace_backward
        if inplace is None:
            inplace = may_overwrite(logits)
        ctx.overwritten = inplace
        plan, softmax = ctx.plan, Softmax(m, log_s, entropy)
        z = logit_rows(logits, plan.layout)
        out = z if inplace else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        local = shard_ids(ids, plan.shard, z.shape[1])
        log_probs = id_log_probs(softmax, z_ids, local.exists, plan.inv_temperature)
        write_gradients(z, out, softmax, local, log_probs, grad_log_probs, grad_entropy, plan)
        return logits.detach() if inplace else plan.layout.from_rows(out), None, None
