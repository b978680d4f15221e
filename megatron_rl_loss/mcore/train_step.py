"""One optimizer step: forward_backward through Megatron's schedule, metrics, update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ContractError, LayoutError, MegatronRLLossError
from ..metrics import reduce_metrics
from ..parallel.agreement import raise_together
from .forward_step import ForwardStep
from .groups import ParallelGroups, parallel_groups
from .guard import model_config
from .micro_batches import MicroBatchIterator


def run_forward_backward(
    forward_step: ForwardStep | Any,
    chunks: Sequence[Any],
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
) -> list[Any]:
    """Runs Megatron's schedule over this rank's micro-batches and returns what it collected.

    All micro-batches of all data-parallel ranks have one shape [rows, S] when the pipeline has
    more than one stage; there must be equally many on every rank.

    Returns:
        One metrics dict per micro-batch on a last pipeline stage, an empty list elsewhere; with
        `collect_non_loss_data`, what the loss function returned.

    Raises:
        ContractError: there is no micro-batch.
        LayoutError: the interleaved schedule cannot run that many micro-batches, or would mix up
            its transfers.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not micro_batches:
        raise ContractError(
            "a rank needs at least one micro-batch (its mask may be all False), got none."
        )
    if len(chunks) > 1:
        config = model_config(chunks[0])
        check_interleaved_count(len(micro_batches), config)
        check_interleaved_transfers(config)
    rows, seq_length = micro_batches[0]["tokens"].shape
    iterators = [MicroBatchIterator(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=seq_length,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
    )


def check_interleaved_count(num_microbatches: int, config: Any) -> None:
    """Raises `LayoutError` unless the interleaved schedule can run `num_microbatches`.

    Its groups of micro-batches must be full, or the last one must still fill the pipeline.
    """
    stages = config.pipeline_model_parallel_size
    group = config.microbatch_group_size_per_vp_stage or stages
    rest = num_microbatches % group
    if num_microbatches < group or 0 < rest < stages:
        raise LayoutError(
            f"{num_microbatches} micro-batches do not suit the interleaved schedule: with "
            f"pipeline_model_parallel_size {stages} and virtual pipeline stages it needs a "
            f"multiple of {group}. Plan with multiple={group} (plan_micro_batches adds zero-weight "
            f"micro-batches where it must), or use {num_microbatches + -num_microbatches % group}."
        )


def check_interleaved_transfers(config: Any) -> None:
    """Raises `LayoutError` if two pipeline stages would batch their transfers.

    With 2 stages, previous and next rank are the same one; in a batch, an activation is then
    received as a gradient and the other way round, and the loss and the gradient are wrong.
    """
    if config.pipeline_model_parallel_size == 2 and config.batch_p2p_comm:
        raise LayoutError(
            "pipeline_model_parallel_size 2 with virtual pipeline stages needs overlap_p2p_comm="
            "True and batch_p2p_comm=False: batched transfers mix up activations and gradients "
            "between the same two ranks. Set both, or use more pipeline stages."
        )


def train_step(
    forward_step: ForwardStep,
    chunks: Sequence[Any],
    optimizer: Any,
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    scheduler: Any = None,
) -> dict[str, float]:
    """Trains on one mini-batch and returns its metrics, the same on every rank.

    Args:
        micro_batches: this rank's part, with `loss_weights` or pre-normalised advantages.

    Returns:
        The metrics of `reduce_metrics` plus `grad_norm` (before clipping), `learning_rate` and
        `step_skipped` (1 when the optimizer skipped an overflow).

    Raises:
        InputError: a micro-batch is wrong (on any rank), or the loss is not finite; weights and
            optimizer are as before.

    Communicates: what Megatron does; then two small all-reduces for the metrics and a broadcast
    from the last pipeline stage.
    """
    groups = parallel_groups()
    raise_together(lambda: forward_step.check(micro_batches), groups.dp)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    collected = run_forward_backward(forward_step, chunks, micro_batches)
    metrics = share_metrics(collected, groups)
    updated, grad_norm, _ = optimizer.step()
    if updated and scheduler is not None:
        scheduler.step(increment=1)
    metrics["grad_norm"] = float(grad_norm) if grad_norm is not None else math.nan
    metrics["learning_rate"] = max(group["lr"] for group in optimizer.param_groups)
    metrics["step_skipped"] = 0.0 if updated else 1.0
    return metrics


def share_metrics(
    collected: Sequence[Mapping[str, torch.Tensor]], groups: ParallelGroups
) -> dict[str, float]:
    """Returns the reduced metrics on every rank; last pipeline stages reduce and broadcast them."""
    box: list[Any] = [None]
    if groups.is_last_pipeline_stage:
        try:
            box[0] = reduce_metrics(collected, dp_cp_group=groups.dp_cp)
        except MegatronRLLossError as error:
            box[0] = error  # the other stages wait for the broadcast: raise on all of them
    if groups.pp.size() > 1:
        last = dist.get_global_rank(groups.pp, groups.pp.size() - 1)
        dist.broadcast_object_list(box, src=last, group=groups.pp)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]
