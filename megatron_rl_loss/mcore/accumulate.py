"""Several forward_backward calls before one optimizer step, with one gradient reduction.

Megatron's schedules reduce gradients over ranks at the end of every call. A second call would then
add local gradients to reduced ones and reduce the sum again: with the distributed optimizer, whose
reduce-scatter leaves only a rank's own shard reduced, not even a division repairs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from ..errors import ContractError
from .guard import model_config


@contextmanager
def one_gradient_reduction(chunks: Sequence[Any]) -> Iterator[None]:
    """Lets the forward_backward calls inside only accumulate gradients, and reduces at the end.

    The loss of each call is scaled by that call's own number of micro-batches (the data iterator
    knows it), so the gradient is that of all their tokens, under weights made once for all of
    them. Every rank must make the same calls; one without data runs fillers. Report metrics with
    `reduce_metrics(..., num_calls=...)`.

        for chunk in chunks:
            chunk.zero_grad_buffer()
        with one_gradient_reduction(chunks):
            for micro_batches in calls:
                collected += run_forward_backward(forward_step, chunks, micro_batches)
        optimizer.step()

    Held back are `finalize_model_grads_func`, the reductions that overlap with backward, and
    `grad_sync_func`. Expert biases of a router, which finalizing updates, are updated once too.

    Args:
        chunks: the model as it is handed to the schedule, wrapped in Megatron's DDP.

    Raises:
        ContractError: no forward_backward call with backward was made inside, the config has no
            `finalize_model_grads_func`, or reductions are held back already.

    Communicates: at the end, what `finalize_model_grads` does; nothing if the block raises, and
    the gradients are then local sums: zero them before the next step.
    """
    config = model_config(chunks[0])
    finalize = config.finalize_model_grads_func
    _check_hooks(finalize)
    recorder = _FinalizeRecorder()
    hooks = {name: getattr(config, name) for name in ("no_sync_func", "grad_sync_func")}
    config.finalize_model_grads_func = recorder
    config.no_sync_func, config.grad_sync_func = nullcontext, None
    try:
        with ExitStack() as stack:
            for chunk in chunks:
                if hasattr(chunk, "no_sync"):
                    stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.finalize_model_grads_func = finalize
        for name, hook in hooks.items():
            setattr(config, name, hook)
    recorder.finalize(finalize, chunks)


class _FinalizeRecorder:
    """Stands for `finalize_model_grads` and remembers how the schedule called it."""

    def __init__(self) -> None:
        self._arguments: dict[str, Any] | None = None

    def __call__(self, model: Any, num_tokens: Any = None, **arguments: Any) -> None:
        if num_tokens is not None:
            raise ContractError(
                "the schedule divides gradients by a token count (calculate_per_token_loss), "
                "which differs from call to call; switch it off."
            )
        self._arguments = arguments

    def finalize(self, finalize: Callable[..., None], chunks: Sequence[Any]) -> None:
        if self._arguments is None:
            raise ContractError(
                "no forward_backward call with a backward pass ended inside "
                "one_gradient_reduction; a rank without data must run fillers."
            )
        for chunk in chunks:
            _start_overlapped_reduction(chunk)
        finalize(list(chunks), None, **self._arguments)


def _check_hooks(finalize: Any) -> None:
    if finalize is None:
        raise ContractError(
            "config.finalize_model_grads_func is not set; there is nothing that would reduce the "
            "gradients. wrap_with_ddp sets it."
        )
    if isinstance(finalize, _FinalizeRecorder):
        raise ContractError(
            "one_gradient_reduction is already in effect for this model; use one block per "
            "optimizer step."
        )


def _start_overlapped_reduction(chunk: Any) -> None:
    """With overlap, finalizing only waits for reductions that the last backward pass started."""
    ddp_config = getattr(chunk, "ddp_config", None)
    if ddp_config is None or not ddp_config.overlap_grad_reduce:
        return
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        # until a backward pass has counted its gradients, finalizing starts them itself
        if not getattr(group, "is_first_batch", False):
            group.start_grad_sync()
