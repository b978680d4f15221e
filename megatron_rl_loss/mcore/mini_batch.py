"""Cuts a mini-batch into this rank's micro-batches, weights first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..parallel.context_parallel import sequence_multiple
from ..types import MicroBatch
from .collate import collate, with_sequence_weights
from .groups import ParallelGroups
from .planning import Plan, plan_micro_batches


def cut_mini_batch(
    sequences: Sequence[Mapping[str, Any]],
    groups: ParallelGroups,
    *,
    reduction: str = "token_mean",
    max_seq_len: int | None = None,
    count_empty_sequences: bool = True,
    micro_batch_size: int | None = None,
    max_tokens_per_microbatch: int | None = None,
    sequence_parallel: bool = False,
    virtual_pipeline_model_parallel_size: int | None = None,
) -> tuple[list[MicroBatch], Plan]:
    """Returns this rank's micro-batches, with `loss_weights`, and the plan of all ranks.

    Args:
        sequences: the whole mini-batch, the same on every rank; dicts of 1-D tensors.
        groups: this rank's.
        reduction, max_seq_len, count_empty_sequences: as in `token_weights`.
        micro_batch_size, max_tokens_per_microbatch: as in `plan_micro_batches`.
        sequence_parallel: rows are padded to a multiple of the tensor-parallel size; with context
            parallelism to what its slices need.
        virtual_pipeline_model_parallel_size: with it, the interleaved schedule wants a multiple
            of the pipeline size as number of micro-batches.
    """
    seq_multiple = sequence_multiple(groups.tp.size() if sequence_parallel else 1, groups.cp.size())
    plan = plan_micro_batches(
        [len(sequence["tokens"]) for sequence in sequences],
        dp_size=groups.dp.size(),
        micro_batch_size=micro_batch_size,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        multiple=groups.pp.size() if virtual_pipeline_model_parallel_size else 1,
        pad_to=seq_multiple,
    )
    weighted = with_sequence_weights(
        sequences,
        reduction,
        micro_batch_ids=plan.micro_batch_ids,
        max_seq_len=max_seq_len,
        count_empty_sequences=count_empty_sequences,
    )
    one_shape: dict[str, int] = {}
    if groups.pp.size() > 1:  # pipeline stages exchange tensors of one shape
        one_shape = {"width": max(plan.lengths), "rows": plan.max_rows}
    mine = plan.micro_batches[groups.dp.rank()]
    return [
        collate(weighted, indices, multiple=seq_multiple, **one_shape) for indices in mine
    ], plan
