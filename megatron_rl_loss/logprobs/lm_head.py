"""Log-probs and entropy from hidden states and the LM head's weight, without [N, V] logits.

The head's matrix product runs over blocks of the vocabulary, in forward and (recomputed) in
backward, into one [N, block] buffer. If the logits fit the memory budget they are one block that
is kept, which saves the recomputation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from .head_blocks import (
    HeadBackward,
    block_buffer,
    block_ids,
    block_logits,
)
from .head_plan import DEFAULT_BUDGET_BYTES, HeadPlan, make_head_plan
from .inputs import check_log_prob_values, check_token_ids
from .row_function import Softmax, id_log_probs, reduce_statistics, shard_ids
from .rows_eager import LOWEST, compute_dtype
from .vocab_parallel import VocabOutputs, check_ids, keep_trained


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    loss_mask: Tensor | None = None,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    block_size: int | None = None,
    accumulate_main_grad: bool = False,
    backend: str | None = None,
    debug: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`vocab_parallel_log_probs(hidden @ weight.T, labels)` without holding the logits.

    Formula: logits = hidden @ weight^T, rounded to hidden's dtype; the rest in fp32 as there.

    Args:
        hidden: [..., H], output of the last layer (after the final norm), the same on every rank
            of tp_group; with sequence_parallel [s / tp, ..., H], this rank's part of dimension 0.
            Gets the gradient.
        weight: [V_local, H], this rank's rows of the LM head (or tied embedding), same dtype.
            Gets the gradient.
        labels: [...] with the whole sequence: [s, ...] if sequence_parallel.
        tp_group, temperature, with_entropy, vocab_size, loss_mask, backend, debug: as in
            `vocab_parallel_log_probs`.
        sequence_parallel: hidden is split over tp_group along dimension 0.
        memory_budget_bytes: the logits are kept if they fit, else computed block by block, twice.
        block_size: columns per block, to overrule the budget.
        accumulate_main_grad: add the weight's gradient to `weight.main_grad`, as Megatron does
            under `gradient_accumulation_fusion`, and set `weight.grad_added_to_main_grad`.

    Returns:
        log_probs, entropy: shape of labels, fp32, the same on every rank of tp_group.

    Raises:
        InputError: as `vocab_parallel_log_probs`; hidden and weight do not fit.

    Communicates: the two all-reduces of `vocab_parallel_log_probs`. With more than one rank also,
        in backward, hidden's gradient: an all-reduce of [N, H] fp32, or with sequence_parallel a
        reduce-scatter of it, and an all-gather of hidden in both directions.
    Gradient: hidden's is complete on every rank (summed over the vocabulary shards), so hidden
        must not pass through another reducing region first. The weight's gradient is written once
        per block.
    """
    outputs = linear_outputs(
        hidden, weight, labels, tp_group=tp_group, sequence_parallel=sequence_parallel,
        temperature=temperature, with_entropy=with_entropy, vocab_size=vocab_size,
        loss_mask=loss_mask, memory_budget_bytes=memory_budget_bytes, block_size=block_size,
        accumulate_main_grad=accumulate_main_grad, backend=backend, debug=debug,
    )  # fmt: skip
    return outputs.log_probs, outputs.entropy


def linear_outputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    token_ids: Tensor | None = None,
    loss_mask: Tensor | None = None,
    debug: bool = False,
    **settings: Any,
) -> VocabOutputs:
    """What `linear_log_probs` gives, and the log-probs of other tokens, in the same passes.

    Args:
        token_ids: [..., K] int64 global ids, constant, or None; `token_log_probs` of the result
            are theirs.
        hidden, weight, labels, loss_mask, debug, settings: as in `linear_log_probs`.

    Returns:
        `VocabOutputs` without argmax and top-k.

    Communicates: as there, the SUM all-reduce with K rows more.
    """
    plan = make_head_plan(hidden, weight, labels, loss_mask, **settings)
    ids = labels.long().reshape(-1, 1)
    if token_ids is not None:
        check_token_ids("token_ids", token_ids, (*labels.shape, token_ids.shape[-1]))
        ids = torch.cat([ids, token_ids.long().reshape(len(ids), -1)], 1)
    check_ids(labels, token_ids, loss_mask, plan.shard.vocab_size, debug)
    values, entropy = LinearLogProbs.apply(hidden, weight, ids, plan)
    others = None
    if token_ids is not None:
        values, others = values.split([1, token_ids.shape[-1]], 1)
        others = keep_trained(others.reshape(token_ids.shape), loss_mask)
    log_probs = keep_trained(values.reshape(labels.shape), loss_mask)
    entropy = None if entropy is None else keep_trained(entropy.view(labels.shape), loss_mask)
    if debug:
        check_log_prob_values(log_probs, loss_mask)
    return VocabOutputs(log_probs=log_probs, entropy=entropy, token_log_probs=others)


class LinearLogProbs(torch.autograd.Function):
    """(hidden [..., H], weight [V_local, H], ids [N, K], plan) -> (log-probs [N, K], entropy)."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, ids: Tensor, plan: HeadPlan):
        rows = gather_sequence(hidden.detach(), plan).reshape(-1, hidden.shape[-1])
        keep = plan.keeps_logits and any(ctx.needs_input_grad[:2])
        softmax, z_ids, logits = head_statistics(rows, weight.detach(), ids, plan)
        ctx.save_for_backward(hidden, weight, ids, *softmax, z_ids)
        # not a saved tensor: backward overwrites it, and recomputes it if run again
        ctx.plan, ctx.logits = plan, logits if keep else None
        ctx.set_materialize_grads(False)
        exists = shard_ids(ids, plan.shard, weight.shape[0]).exists
        log_probs = id_log_probs(softmax, z_ids, exists, plan.inv_temperature)
        return log_probs, None if softmax.entropy is None else softmax.entropy.clone()

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):
        if torch.is_grad_enabled():
            raise InputError("linear_log_probs has no second derivative; no create_graph here.")
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None
        hidden, weight, ids, m, log_s, entropy, z_ids = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        run = HeadBackward(
            gather_sequence(hidden.detach(), ctx.plan).reshape(-1, hidden.shape[-1]),
            weight,
            ids,
            Softmax(m, log_s, entropy),
            z_ids,
            ctx.plan,
        )
        wanted = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = run(grad_log_probs, grad_entropy, logits, *wanted)
        if grad_hidden is not None:
            grad_hidden = reduce_hidden_gradient(grad_hidden, hidden, ctx.plan)
        return grad_hidden, grad_weight, None, None


def head_statistics(
    rows: Tensor, weight: Tensor, ids: Tensor, plan: HeadPlan
) -> tuple[Softmax, Tensor, Tensor | None]:
    """Statistics of whole rows, the ids' logits [N, K] and the last block's logits.

    Args:
        rows: [N, H] hidden states of all tokens.
        weight: [V_local, H].
        ids: [N, K] global ids.
    """
    dtype = compute_dtype(rows.dtype)
    m = torch.full(rows.shape[:1], -torch.inf, dtype=dtype, device=rows.device)
    s, t = torch.zeros_like(m), torch.zeros_like(m) if plan.with_entropy else None
    z_ids = torch.zeros(ids.shape, dtype=dtype, device=rows.device)
    buffer, z = block_buffer(rows, plan), None
    for start, end in plan.blocks():
        z = block_logits(rows, weight, start, end, buffer)
        block = plan.rows.row_statistics(z, plan.inv_temperature, plan.with_entropy)
        m, s, t = merge_statistics((m, s, t), block, plan.inv_temperature)
        local = block_ids(ids, start, end, plan)
        z_ids += z.gather(1, local.columns).to(dtype).masked_fill(~local.here, 0)
    softmax, z_ids = reduce_statistics(m, s, t, z_ids, plan.inv_temperature, plan.shard.group)
    return softmax, z_ids, z


def merge_statistics(one: tuple, other: tuple, inv_temperature: float) -> tuple:
    """Joins the (m, s, t) of two sets of columns; see `rows_eager.row_statistics`."""
    m = torch.maximum(one[0], other[0])
    origin = m.masked_fill(m == -torch.inf, 0)
    s, t = 0, None if one[2] is None else 0
    for part_m, part_s, part_t in (one, other):
        shift = ((part_m - origin) * inv_temperature).clamp(min=LOWEST)
        s = s + part_s * shift.exp()
        t = None if t is None else t + (part_t + part_s * shift) * shift.exp()
    return m, s, t


def gather_sequence(hidden: Tensor, plan: HeadPlan) -> Tensor:
    """[s / tp, ..., H] -> [s, ..., H] under sequence parallelism, else the same."""
    if not plan.sequence_parallel:
        return hidden
    whole = hidden.new_empty(hidden.shape[0] * plan.shard.group.size(), *hidden.shape[1:])
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=plan.shard.group)
    return whole


def reduce_hidden_gradient(grad: Tensor, hidden: Tensor, plan: HeadPlan) -> Tensor:
    """Sums [N, H] over the vocabulary shards; this rank's part under sequence parallelism."""
    group = plan.shard.group
    if plan.sequence_parallel:
        part = grad.new_empty(hidden.shape)
        dist.reduce_scatter_tensor(part, grad.view(-1, *hidden.shape[1:]), group=group)
        return part.to(hidden.dtype)
    if group is not None:
        dist.all_reduce(grad, group=group)
    return grad.view(hidden.shape).to(hidden.dtype)
