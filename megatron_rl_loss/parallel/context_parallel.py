"""Context parallelism: which positions of a sequence a rank holds, and how to get the others.

Causal attention costs more for later positions, so a sequence is cut into 2 * C chunks, of which
rank r of C holds chunks r and 2 * C - 1 - r (zigzag): tokens 0 .. 7 on two ranks are [0, 1, 6, 7]
and [2, 3, 4, 5]. Megatron's rotary embedding and Transformer Engine's attention assume this order.
In a packed row each sequence is cut on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError


def sequence_multiple(tp_size: int = 1, cp_size: int = 1) -> int:
    """Returns what the length of a row (packed: of each sequence) must be a multiple of.

    Args:
        tp_size: tensor-parallel size if sequence parallelism is on, else 1.
        cp_size: context-parallel size.

    >>> sequence_multiple(), sequence_multiple(tp_size=2), sequence_multiple(tp_size=2, cp_size=2)
    (1, 2, 8)
    """
    if tp_size < 1 or cp_size < 1:
        raise InputError(f"tp_size and cp_size must be at least 1, got {tp_size} and {cp_size}.")
    return tp_size * (2 * cp_size if cp_size > 1 else 1)


def pad_sequence_to(x: Tensor, multiple: int, *, value: Any = 0, dim: int = 1) -> Tensor:
    """Returns `x` padded on the right of `dim` to a multiple; masks with False, weights with 0.

    >>> pad_sequence_to(torch.ones(1, 3), 4)
    tensor([[1., 1., 1., 0.]])
    """
    if multiple < 1:
        raise InputError(f"multiple must be at least 1, got {multiple}.")
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, value)], dim=dim)


def zigzag_positions(cu_seqlens: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Returns the positions of the whole row that a rank holds, in its order.

    Args:
        cu_seqlens: offsets of the sequences in the row, padded; (0, S) for a row of one.

    Returns:
        [S / cp_size] int64 on the CPU.

    Raises:
        InputError: a length is not a multiple of 2 * cp_size, or there is no such rank.

    >>> zigzag_positions((0, 8), 0, 2).tolist(), zigzag_positions((0, 8), 1, 2).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    if cp_size < 1:
        raise InputError(f"cp_size must be at least 1, got {cp_size}.")
    if not 0 <= cp_rank < cp_size:
        raise InputError(f"cp_rank must be from 0 to cp_size - 1 = {cp_size - 1}, got {cp_rank}.")
    cu_seqlens = _offsets(cu_seqlens)
    if cp_size == 1:
        return torch.arange(cu_seqlens[-1])
    parts = []
    for start, end in pairwise(cu_seqlens):
        chunk, rest = divmod(end - start, 2 * cp_size)
        if rest:
            raise InputError(
                f"a sequence of {end - start} tokens does not split over {cp_size} context-"
                f"parallel ranks: pad it to a multiple of 2 * {cp_size}, with mask False."
            )
        for i in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + i * chunk, start + (i + 1) * chunk))
    return torch.cat(parts)


def zigzag_split(
    x: Tensor,
    cp_rank: int,
    cp_size: int,
    *,
    dim: int = 1,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Returns the slice of the rows that a context-parallel rank holds.

    Args:
        x: [rows, S, ...] (or with the sequence at another `dim`), whole rows.
        cu_seqlens: padded offsets of the sequences of packed rows.

    Raises:
        InputError: as `zigzag_positions`, or the offsets are not those of rows of S tokens.

    >>> zigzag_split(torch.arange(8)[None], 1, 2)
    tensor([[2, 3, 4, 5]])
    """
    if cp_size == 1:
        return x
    positions = zigzag_positions(_offsets(cu_seqlens, x.shape[dim]), cp_rank, cp_size)
    return x.index_select(dim, positions.to(x.device))


def zigzag_merge(
    shards: Sequence[Tensor], *, dim: int = 1, cu_seqlens: Sequence[int] | Tensor | None = None
) -> Tensor:
    """Returns the whole rows from the slices of all ranks, in rank order.

    Raises:
        InputError: as `zigzag_split`, or the slices have different shapes.

    >>> zigzag_merge([torch.tensor([[0, 1, 6, 7]]), torch.tensor([[2, 3, 4, 5]])])
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    if len({shard.shape for shard in shards}) != 1:
        shapes = ", ".join(str(tuple(shard.shape)) for shard in shards)
        raise InputError(f"slices of all ranks must have one shape, got: {shapes or 'none'}.")
    joined = torch.cat(list(shards), dim=dim)
    if len(shards) == 1:
        return joined
    offsets = _offsets(cu_seqlens, joined.shape[dim])
    order = torch.cat([zigzag_positions(offsets, r, len(shards)) for r in range(len(shards))])
    return joined.index_select(dim, order.argsort().to(joined.device))


def _offsets(cu_seqlens: Sequence[int] | Tensor | None, length: int | None = None) -> list[int]:
    if cu_seqlens is None:
        return [0, length]
    offsets = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)
    rising = offsets == sorted(offsets) and all(isinstance(x, int) for x in offsets)
    if len(offsets) < 2 or not rising or offsets[0] or length not in (None, offsets[-1]):
        end = "the row's length" if length is None else f"the row's {length} tokens"
        raise InputError(
            f"cu_seqlens must rise from 0 to {end}, in integers, got {offsets}; pass the padded "
            "offsets, cu_seqlens_padded."
        )
    return offsets


def gather_sequence(
    x: Tensor,
    cp_group: dist.ProcessGroup | None,
    *,
    dim: int = 1,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Returns the whole rows on every rank, for losses that need whole-sequence quantities.

    Args:
        x: [rows, S / C, ...], this rank's slice; gets the gradient.
        cp_group: context-parallel group; None or one rank: x is returned.
        dim, cu_seqlens: as in `zigzag_split`.

    Returns:
        [rows, S, ...].

    Communicates: one all-gather in forward, nothing in backward.
    Gradient: this rank's slice of the incoming gradient, not summed over the ranks. Right where
        every rank makes the same loss from the whole rows, whose gradients the ranks' parameters
        get each through its own slice; a sum would make them C times too large. Where a rank's
        loss is that of its own tokens only, take `gather_sequence_summing`.
    """
    return _gather(x, cp_group, dim, cu_seqlens, False)


def gather_sequence_summing(
    x: Tensor,
    cp_group: dist.ProcessGroup | None,
    *,
    dim: int = 1,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """As `gather_sequence`, where each rank's loss is that of its own tokens only.

    So it is for keys and values, which each rank uses for its own queries.

    Communicates: one all-gather in forward, one SUM all-reduce in backward (fp32 at least).
    Gradient: this rank's slice of the incoming gradients, summed over the ranks.
    """
    return _gather(x, cp_group, dim, cu_seqlens, True)


def _gather(
    x: Tensor,
    group: dist.ProcessGroup | None,
    dim: int,
    cu_seqlens: Sequence[int] | Tensor | None,
    sum_gradients: bool,
) -> Tensor:
    if group is None or group.size() == 1:
        return x
    return _GatherSequence.apply(x, group, dim, cu_seqlens, sum_gradients)


class _GatherSequence(torch.autograd.Function):
    """torch.distributed.nn's all_gather breaks in backward on a sub-group under gloo."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        dim: int,
        cu_seqlens: Sequence[int] | Tensor | None,
        sum_gradients: bool,
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.cu_seqlens = group, dim, cu_seqlens
        ctx.sum_gradients = sum_gradients
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        return zigzag_merge(shards, dim=dim, cu_seqlens=cu_seqlens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dtype = gradient.dtype
        if ctx.sum_gradients:
            gradient = gradient.to(torch.promote_types(dtype, torch.float32)).clone(
                memory_format=torch.contiguous_format
            )
            dist.all_reduce(gradient, group=ctx.group)
        local = zigzag_split(
            gradient, ctx.group.rank(), ctx.group.size(), dim=ctx.dim, cu_seqlens=ctx.cu_seqlens
        )
        return local.to(dtype), None, None, None, None
