"""Token weights and pre-normalised advantages of a mini-batch, from global counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_loss_mask, per_token
from ..ops.reduction import check_reduction, weights_from_counts
from .counts import global_counts


def token_weights(
    loss_mask: Tensor,
    reduction: str,
    *,
    group_ids: Tensor | None = None,
    max_seq_len: int | None = None,
    micro_batch_ids: Tensor | None = None,
    count_empty_sequences: bool = True,
    dp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns w, the weight of each token in the loss sum_t w_t * l_t of the mini-batch.

    Formula: see `ops.reduction`. The counts are those of the whole mini-batch, over `dp_group`,
    so call it once per mini-batch with **all** of this rank's sequences, before they are cut into
    micro-batches. The weights then hold for every cut.

    Args:
        loss_mask: [rows, S] bool, True where the token is trained. Every row is a real sequence.
        reduction: "token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm",
            "prompt_mean" or "sum".
        group_ids: [rows] int, for "prompt_mean": the same id for the same prompt on every rank.
        max_seq_len: for "seq_mean_token_sum_norm": the fixed length L, in tokens.
        micro_batch_ids: [rows] int, for "token_mean_legacy": this rank's micro-batch of each row.
        count_empty_sequences: whether a sequence without a trained token counts in B and P.
        dp_group: data-parallel group without context parallelism; None if this rank has it all.

    Returns:
        [rows, S] fp32, constant, exactly 0 where the mask is False.

    Raises:
        ConfigError: unknown reduction, or `max_seq_len` missing.
        InputError: ids missing, or a wrong shape or dtype.

    Communicates: one small all-reduce over `dp_group`; "prompt_mean" also gathers the group ids.

    >>> mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    >>> token_weights(mask, "sequence_mean")[:, 0]
    tensor([0.1667, 0.3333, 0.0833])
    """
    check_reduction(reduction, max_seq_len)
    check_loss_mask(loss_mask)
    counts = global_counts(
        loss_mask,
        reduction=reduction,
        group_ids=group_ids,
        micro_batch_ids=micro_batch_ids,
        count_empty_sequences=count_empty_sequences,
        dp_group=dp_group,
    )
    return weights_from_counts(loss_mask, reduction, counts, max_seq_len=max_seq_len)


def normalize_advantages(
    advantages: Tensor, loss_mask: Tensor, reduction: str, **counting: Any
) -> Tensor:
    """Returns w * A: advantages that carry the token weights, for losses that only sum.

    Policy losses that are positively homogeneous in A satisfy w * l(A) == l(w * A) for w >= 0, so
    these advantages with the reduction "sum" give the same gradient as raw advantages with
    weights. Terms that are not homogeneous (KL, entropy, value) need the weights themselves.

    Args:
        advantages: [rows, S] or [rows] (one per sequence), float, raw, constant.
        loss_mask, reduction, **counting: as in `token_weights`.

    Returns:
        [rows, S] fp32, exactly 0 where the mask is False whatever the input holds there.

    Raises:
        ConfigError, InputError: as `token_weights`, and for a wrong shape.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    >>> normalize_advantages(torch.tensor([1.0, -1.0]), mask, "token_mean")
    tensor([[ 0.3333,  0.3333,  0.0000],
            [-0.3333,  0.0000,  0.0000]])
    """
    weights = token_weights(loss_mask, reduction, **counting)
    advantages = per_token("advantages", advantages, loss_mask)
    return torch.where(loss_mask, advantages.detach().float() * weights, 0.0)
