"""Measures a gradient on the real schedule, and the same gradient without the schedule's scaling.

The reference: every micro-batch's local weighted sum gets the gradient 1, whatever the schedule
did to the number; gradients are accumulated without any reduction by DDP, then summed over data-
and context-parallel ranks here. So neither num_microbatches nor dp_size, cp_size, a flag or a
missing hook enters it. Megatron's sums over tensor- and pipeline-parallel ranks (norms under
sequence parallelism, tied embeddings) are made once, by `finalize_model_grads` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..losses.objective import Objective
from ..parallel.token_batch import TokenBatch
from ..types import MicroBatch
from .forward_step import ForwardStep
from .groups import ParallelGroups
from .guard import model_config
from .train_step import run_forward_backward

Gradients = list[Tensor]


class Measured(NamedTuple):
    """A gradient of this rank's parameters, and how often it was reduced over data ranks."""

    gradients: Gradients
    num_reductions: int


def schedule_gradients(
    step: Callable[..., Any], chunks: Sequence[Any], micro_batches: Sequence[MicroBatch]
) -> Measured:
    """Returns the gradient that an optimizer would see after one forward_backward call."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with ExitStack() as stack:
        counts = [stack.enter_context(_counted_reductions(chunk)) for chunk in chunks]
        run_forward_backward(step, chunks, micro_batches)
    for chunk in chunks:
        _complete_shards(chunk)
    return Measured(_copies(chunks), max(count[0] for count in counts))


def reference_gradients(
    step: ForwardStep, chunks: Sequence[Any], micro_batches: Sequence[MicroBatch]
) -> Gradients:
    """Returns the gradient of sum_t w_t l_t over all ranks; see the module's text.

    Communicates: the pipeline's transfers, and one all-reduce per parameter.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with _summed_over_data_ranks(chunks):
        run_forward_backward(UnscaledStep(step), chunks, micro_batches)
    return _copies(chunks)


class UnscaledStep(ForwardStep):
    """A forward step whose local weighted sum gets the gradient 1 in every micro-batch."""

    def __init__(self, step: ForwardStep) -> None:
        vars(self).update(vars(step))

    def _guard(self, model: Any, groups: ParallelGroups) -> bool:
        """Nothing to guard: no scaling of the schedule's reaches the gradient."""
        return False

    def _loss(
        self, batch: TokenBatch, factor: float, *model_output: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss_sum, metrics = super()._loss(batch, 1.0, *model_output)
        return _UnitGradient.apply(loss_sum), metrics


class UnguardedStep(ForwardStep):
    """The forward step without its guard, so that a refused set-up can be measured.

    It takes `calculate_per_token_loss` to be off, whatever the config says.
    """

    def __init__(self, step: ForwardStep) -> None:
        vars(self).update(vars(step))

    def _guard(self, model: Any, groups: ParallelGroups) -> bool:
        return False


class _UnitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor) -> Tensor:
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ones_like(gradient)


def objective_for_any_policy_loss() -> Objective:
    """Returns what the probe's gradient is compared with under a forward step of somebody else's:
    with all ratios 1 every policy loss has the gradient of this one."""
    return Objective(loss="importance_sampling")


@contextmanager
def _counted_reductions(chunk: Any) -> Iterator[list[int]]:
    """Counts the calls of DDP's `finish_grad_sync`, which reduces over data-parallel ranks."""
    count = [0]
    original = chunk.finish_grad_sync

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(*args, **kwargs)

    chunk.finish_grad_sync = counted
    try:
        yield count
    finally:
        del chunk.finish_grad_sync


@contextmanager
def _summed_over_data_ranks(chunks: Sequence[Any]) -> Iterator[None]:
    """Replaces the reduction over data-parallel ranks by a plain sum, once per call."""
    from megatron.core.distributed import finalize_model_grads

    config = model_config(chunks[0])
    names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func")
    kept = {name: getattr(config, name) for name in names}

    def finalize(model: Any, num_tokens: Any = None, **arguments: Any) -> None:
        finalize_model_grads(model, None, **arguments)

    config.finalize_model_grads_func = finalize
    config.no_sync_func, config.grad_sync_func = nullcontext, None
    try:
        with ExitStack() as stack:
            for chunk in chunks:
                chunk.finish_grad_sync = _sum_of(chunk)
                stack.callback(delattr, chunk, "finish_grad_sync")
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


def _sum_of(chunk: Any) -> Callable[..., None]:
    def sum_over_data_ranks(*args: Any, **kwargs: Any) -> None:
        for name, parameter in trained_parameters([chunk]):
            dist.all_reduce(parameter.main_grad, group=data_group(name, parameter))

    return sum_over_data_ranks


def data_group(name: str, parameter: Any) -> dist.ProcessGroup:
    """Returns the ranks whose gradients of this parameter belong to other tokens."""
    from megatron.core import parallel_state

    if is_expert(name, parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def is_expert(name: str, parameter: Any) -> bool:
    """Tells whether a parameter is an expert's, also if it lacks the mark that DDP goes by."""
    return ".experts." in name or not getattr(parameter, "allreduce", True)


def _complete_shards(chunk: Any) -> None:
    """Puts the shards of the distributed optimizer together: each rank reduced its own only."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            size = bucket.grad_data.numel() // ranks.size()
            start = size * ranks.rank()
            own = bucket.grad_data[start : start + size].clone()
            bucket.grad_data.zero_()
            bucket.grad_data[start : start + size] = own
            dist.all_reduce(bucket.grad_data, group=ranks)


def _copies(chunks: Sequence[Any]) -> Gradients:
    return [p.main_grad.detach().float().clone() for _, p in trained_parameters(chunks)]


def trained_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields name and parameter, in the order of `Gradients`."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield name, parameter
