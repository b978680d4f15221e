"""Sequence sums under context parallelism, where each rank holds a part of every sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.sequences import Sequences
from .context_parallel import zigzag_positions


def make_sequences(
    loss_mask: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> Sequences:
    """Returns the `Sequences` of a micro-batch, of which this rank may hold a part.

    Args:
        loss_mask: [rows, S] bool, this rank's part.
        cu_seqlens: padded offsets of the sequences in the **whole** packed row; None: a row is a
            sequence.
        cp_group: context-parallel group; None or one rank: sequences are whole.
    """
    cp_rank, cp_size = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
    all_reduce = None
    if cp_group is not None and cp_size > 1:
        all_reduce = partial(all_reduce_sum, cp_group)
    if cu_seqlens is None:
        return Sequences(loss_mask, all_reduce=all_reduce)
    ids = packed_segment_ids(cu_seqlens, cp_rank=cp_rank, cp_size=cp_size)
    ids = ids.to(loss_mask.device, non_blocking=True)
    return Sequences(loss_mask, ids, len(cu_seqlens) - 1, all_reduce)


def packed_segment_ids(
    cu_seqlens: Sequence[int] | Tensor, *, cp_rank: int = 0, cp_size: int = 1
) -> Tensor:
    """Returns which sequence each position of a packed row is in, for this rank's part of the row.

    Args:
        cu_seqlens: offsets of the sequences in the row, padded, [N + 1].

    Returns:
        [1, T / cp_size] int64 on the CPU, values in [0, N).

    >>> packed_segment_ids([0, 2, 5])
    tensor([[0, 0, 1, 1, 1]])
    """
    offsets = [int(x) for x in cu_seqlens]
    positions = zigzag_positions(offsets, cp_rank, cp_size)
    return torch.bucketize(positions, torch.tensor(offsets[1:-1]), right=True)[None]


def all_reduce_sum(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Returns the sum of `x` over the group's ranks, differentiably.

    Communicates: one SUM all-reduce over `group`, and one more in backward if `x` needs a
    gradient. Every rank must run both, also a rank whose tokens are all masked.

    Gradient: each rank's loss L_c is the sum over its **own** tokens, and L = sum_c L_c. Every
    L_c depends on s = sum_c x_c, so dL/dx_c = sum_c' dL_c'/ds: the backward adds up the ranks'
    gradients. With own-token losses nothing is counted twice: Megatron multiplies the loss by C
    and averages gradients over D * C ranks, so parameters get the plain sum over context-parallel
    ranks. (Routing back only the local gradient would be right if every rank computed the whole
    L: then dL_c'/ds is the same on each rank and the sum would be C times too large.)
    """
    return _AllReduceSum.apply(x, group)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()  # autograd may hand over an expanded view
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
