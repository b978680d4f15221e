"""Log-probs of a batch without training: old policy, reference, evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.context_parallel import gather_sequence
from ..parallel.token_batch import TokenBatch
from .batch import make_rank_batch
from .fused_head import LMHead, ReadOutput
from .groups import ParallelGroups, parallel_groups
from .train_step import run_forward_backward


@torch.no_grad()
def token_log_probs(
    chunks: Sequence[Any],
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    lm_head: str = "auto",
    memory_budget_bytes: int | None = None,
) -> list[Tensor]:
    """Returns each micro-batch's log-probs, [rows, S] fp32 on the CPU, on every rank.

    Args:
        chunks: the model; its weights and gradients are left as they are.
        micro_batches: as for training; only tokens, labels, positions and masks are read.
        temperature, vocab_size, lm_head, memory_budget_bytes: as in `make_forward_step`.

    Returns:
        Nats; 0 where the loss mask is False.

    Communicates: what the forward pass does; an all-gather over context-parallel ranks; then one
    broadcast from the last pipeline stage.
    """
    head = LMHead(lm_head, memory_budget_bytes, temperature, vocab_size)
    return token_outputs(head, chunks, micro_batches)


def token_outputs(
    head: Any, chunks: Sequence[Any], micro_batches: Sequence[Mapping[str, Any]]
) -> list[Tensor]:
    """Returns what `head` (an `LMHead` or its like) makes of each token, as `token_log_probs`."""
    groups = parallel_groups()
    step = partial(_forward, groups, head)
    results = run_forward_backward(
        step, chunks, micro_batches, forward_only=True, collect_non_loss_data=True
    )
    if groups.pp.size() > 1:
        results = _from_last_stage(results, micro_batches, groups)
    return [values.cpu() for values in results]


def _forward(
    groups: ParallelGroups, head: Any, data_iterator: Any, model: Any
) -> tuple[Tensor, Any]:
    batch = make_rank_batch(next(data_iterator), model, groups)
    output, read = head.run(batch, model, groups)
    return output, partial(_whole_rows, batch, groups, read)


def _whole_rows(
    batch: TokenBatch,
    groups: ParallelGroups,
    read: ReadOutput,
    output: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    values = read(output)[0]
    assert values is not None
    offsets = None if batch.packed is None else batch.packed.offsets
    return gather_sequence(values, groups.cp, cu_seqlens=offsets)


def _from_last_stage(
    results: list[Tensor], micro_batches: Sequence[Mapping[str, Any]], groups: ParallelGroups
) -> list[Tensor]:
    last = dist.get_global_rank(groups.pp, groups.pp.size() - 1)
    device = torch.device("cuda" if dist.get_backend(groups.pp) == "nccl" else "cpu")
    shapes = [torch.as_tensor(m["tokens"]).shape for m in micro_batches]
    if not groups.is_last_pipeline_stage:
        results = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
    flat = torch.cat([result.flatten() for result in results])
    dist.broadcast(flat, src=last, group=groups.pp)
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]
