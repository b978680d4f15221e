"""Keeps micro-batches without a trained token from moving a mixture-of-experts router.

Ranks must run equally many micro-batches, so one with too little data runs fillers. Their policy
loss is 0 by its weights, but a router adds its auxiliary and z losses for whatever tokens it sees,
and counts them for its expert biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .guard import model_config


def run_filler(model: Any, run: Callable[[], Tensor]) -> Tensor:
    """Returns `run()`, with the model's routers in evaluation mode in forward and in backward.

    A router in evaluation mode sends tokens to experts as before, but adds no auxiliary loss. Its
    counts for the expert biases are put back. In backward this matters for recomputed layers.

    A load balancing loss over data-parallel ranks ("global_aux_loss") is left on: skipping it on
    one rank would leave the others waiting.

    Args:
        model: as the schedule hands it to the forward step.
        run: calls it on a micro-batch without a trained token, on every tensor-, context- and
            pipeline-parallel rank.
    """
    routers = _routers(model)
    if not routers or not torch.is_grad_enabled():
        return run()
    with _at_rest(routers):
        output = run()
    if output.requires_grad:
        output.register_hook(partial(_rest_in_backward, routers))
    return output


def _routers(model: Any) -> list[Any]:
    config = model_config(model)
    if not getattr(config, "num_moe_experts", None):
        return []
    kinds = config.moe_router_load_balancing_type
    if "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds):
        return []
    from megatron.core.transformer.moe.router import Router

    return [module for module in model.modules() if isinstance(module, Router)]


@contextmanager
def _at_rest(routers: Sequence[Any]) -> Iterator[None]:
    counts = [getattr(router, "local_tokens_per_expert", None) for router in routers]
    kept = [None if count is None else count.clone() for count in counts]
    modes = [router.training for router in routers]
    try:
        for router in routers:
            router.eval()
        yield
    finally:
        for router, mode in zip(routers, modes, strict=True):
            router.train(mode)
        for count, before in zip(counts, kept, strict=True):
            if count is not None:
                count.copy_(before)


def _rest_in_backward(routers: Sequence[Any], gradient: Tensor) -> None:
    """Puts the routers at rest until the running backward pass is over."""
    stack = ExitStack()
    stack.enter_context(_at_rest(routers))
    torch.autograd.Variable._execution_engine.queue_callback(stack.close)
