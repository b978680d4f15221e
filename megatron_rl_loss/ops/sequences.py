"""Sums and means over whole sequences, given back to every token of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class Sequences:
    """Which tokens of a micro-batch belong to one sequence.

    Without `segment_ids` each row is one sequence. Under context parallelism each rank holds a
    part of every sequence; then `all_reduce` adds up the ranks' sums (`parallel.sequence_sums`).

    Attributes:
        loss_mask: [rows, S] bool; only trained tokens count.
        segment_ids: [rows, S] int64 in [0, num_segments), the sequence of each position, for
            packed rows: different sequences of the micro-batch have different ids, a position of
            no sequence may have any. The same numbering on every context-parallel rank.
        num_segments: how many ids there are.
        all_reduce: sums a tensor over the context-parallel ranks, differentiably.
    """

    loss_mask: Tensor
    segment_ids: Tensor | None = None
    num_segments: int = 0
    all_reduce: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        ids = self.segment_ids
        if ids is not None and (ids.shape != self.loss_mask.shape or self.num_segments < 1):
            raise InputError(
                f"segment_ids must have the shape of loss_mask, {tuple(self.loss_mask.shape)}, and "
                f"num_segments be >= 1; got {tuple(ids.shape)} and {self.num_segments}."
            )

    def sum(self, values: Tensor) -> Tensor:
        """Returns, for every token, the sum of `values` over the trained tokens of its sequence.

        Args:
            values: [rows, S]; gets the gradient. Masked positions may hold anything.

        Returns:
            [rows, S], equal for all tokens of a sequence.

        Communicates: one all-reduce of one number per sequence, only if `all_reduce` is set.
        """
        values = torch.where(self.loss_mask, values, 0.0)
        if self.segment_ids is None:
            totals = values.sum(dim=-1, keepdim=True)
        else:
            totals = values.new_zeros(self.num_segments)
            totals = totals.index_add(0, self.segment_ids.flatten(), values.flatten())
        if self.all_reduce is not None:
            totals = self.all_reduce(totals)
        return totals.expand_as(values) if self.segment_ids is None else totals[self.segment_ids]

    def num_tokens(self) -> Tensor:
        """Returns, for every token, how many trained tokens its sequence has, fp32 [rows, S]."""
        return self.sum(torch.ones_like(self.loss_mask, dtype=torch.float32))

    def mean(self, values: Tensor) -> Tensor:
        """Returns, for every token, the mean over its sequence (0 without a trained token)."""
        return self.sum(values) / self.num_tokens().clamp(min=1.0)
