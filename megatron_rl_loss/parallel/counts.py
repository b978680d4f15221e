"""Counts of a mini-batch over all data-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import integers
from ..errors import InputError
from ..ops.reduction import GlobalCounts


def global_counts(
    loss_mask: Tensor,
    *,
    reduction: str = "token_mean",
    group_ids: Tensor | None = None,
    micro_batch_ids: Tensor | None = None,
    count_empty_sequences: bool = True,
    dp_group: dist.ProcessGroup | None = None,
) -> GlobalCounts:
    """Counts tokens, sequences, groups and micro-batches of the mini-batch.

    Args:
        loss_mask: [rows, S] bool, every sequence of this rank's part of the mini-batch (no padding
            rows; whole sequences, before a context-parallel split).
        reduction: decides which counts are needed.
        group_ids: [rows] int64, the prompt of each row, same id on every rank for the same prompt.
        micro_batch_ids: [rows] int, this rank's micro-batch of each row.
        count_empty_sequences: whether a row without a trained token counts as a sequence (and its
            group as a prompt).
        dp_group: the data-parallel group **without** context parallelism; None: this rank has the
            whole mini-batch.

    Communicates: one SUM all-reduce of 4 integers over `dp_group`; for `prompt_mean` also one
    gather of (group, tokens) pairs.

    Raises:
        InputError: ids are missing or have the wrong shape.
    """
    row_tokens = loss_mask.sum(dim=1)
    counted = torch.ones_like(row_tokens, dtype=torch.bool)
    if not count_empty_sequences:
        counted = row_tokens > 0
    num_micro_batches, micro_batch_tokens = 0, None
    if reduction == "token_mean_legacy":
        ids = _row_ids(micro_batch_ids, row_tokens, "micro_batch_ids", reduction)
        num_micro_batches, micro_batch_tokens = _per_id(ids, row_tokens)
    sums = torch.tensor(
        [int(row_tokens.sum()), int(counted.sum()), num_micro_batches], device=loss_mask.device
    )
    if dp_group is not None:
        dist.all_reduce(sums, group=dp_group)
    num_groups, group_tokens = 0, None
    if reduction == "prompt_mean":
        ids = _row_ids(group_ids, row_tokens, "group_ids", reduction)
        num_groups, group_tokens = _global_groups(ids, row_tokens, counted, dp_group)
    num_tokens, num_sequences, num_micro_batches = (int(x) for x in sums)
    return GlobalCounts(
        num_tokens, num_sequences, num_micro_batches, micro_batch_tokens, num_groups, group_tokens
    )


def _row_ids(ids: Tensor | None, row_tokens: Tensor, name: str, reduction: str) -> Tensor:
    if ids is None:
        raise InputError(f"reduction {reduction!r} needs {name}: one integer per row.")
    ids = integers(name, ids).to(row_tokens.device)
    if ids.shape != row_tokens.shape:
        raise InputError(
            f"{name} has shape {tuple(ids.shape)}, expected one integer per row: "
            f"{tuple(row_tokens.shape)}."
        )
    return ids


def _per_id(ids: Tensor, row_tokens: Tensor) -> tuple[int, Tensor]:
    """Returns the number of different ids and, for each row, the tokens of all rows of its id."""
    unique, inverse = ids.unique(return_inverse=True)
    tokens = torch.zeros(len(unique), dtype=row_tokens.dtype, device=ids.device)
    tokens.index_add_(0, inverse, row_tokens)
    return len(unique), tokens[inverse]


def _global_groups(
    ids: Tensor, row_tokens: Tensor, counted: Tensor, dp_group: dist.ProcessGroup | None
) -> tuple[int, Tensor]:
    rows = torch.stack([ids, row_tokens, counted.long()], dim=1)
    everywhere = gather_rows(rows, dp_group)
    num_groups = everywhere[everywhere[:, 2] > 0, 0].unique().numel()
    unique, inverse = everywhere[:, 0].unique(return_inverse=True)
    tokens = torch.zeros(len(unique), dtype=torch.long, device=ids.device)
    tokens.index_add_(0, inverse, everywhere[:, 1])
    return num_groups, tokens[torch.searchsorted(unique, ids)]


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the rows of all ranks of `group`, in rank order.

    Args:
        rows: [n, k], n may differ by rank (and be 0).

    Communicates: two all-gathers over `group`, the sizes and the padded rows.
    """
    if group is None:
        return rows
    sizes = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = rows.new_zeros(longest, rows.shape[1])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[: int(size)] for part, size in zip(gathered, sizes)])
