"""Refuses, before the first step, set-ups in which Megatron would scale the loss wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import ContractError
from . import compat
from .groups import ParallelGroups
from .scaling import schedule_factor


def check_contract(model: Any, groups: ParallelGroups) -> None:
    """Raises `ContractError` unless gradients will come out as the contract says.

    Checked: Megatron-Core's version; `calculate_per_token_loss`; that gradients are reduced by
    Megatron's own DistributedDataParallel; that `finalize_model_grads_func` is set where ranks
    have to reduce something; that fp16 has a `grad_scale_func`.

    Args:
        model: the model (chunk) that the schedule hands to the forward step, as it is wrapped.
        groups: this rank's groups.
    """
    compat.megatron_version()
    config = model_config(model)
    check_flag(config)
    _check_wrapper(model, groups)
    ranks = groups.dp_cp.size() * groups.pp.size() * groups.tp.size()
    if ranks > 1 and config.finalize_model_grads_func is None:
        raise ContractError(
            "config.finalize_model_grads_func is not set, so gradients would not be reduced over "
            f"{groups.dp_cp.size()} data- and context-parallel, {groups.pp.size()} pipeline and "
            f"{groups.tp.size()} tensor-parallel ranks. Set it: config.finalize_model_grads_func = "
            "megatron.core.distributed.finalize_model_grads."
        )
    if config.fp16 and config.grad_scale_func is None:
        raise ContractError(
            "fp16 needs config.grad_scale_func = optimizer.scale_loss; without it the optimizer "
            "would divide unscaled gradients by the loss scale."
        )


def check_flag(config: Any) -> None:
    """Raises `ContractError` if `calculate_per_token_loss` is on; cheap, for every call."""
    if config.calculate_per_token_loss:
        schedule_factor(1, 1, calculate_per_token_loss=True)


def model_config(model: Any) -> Any:
    """Returns the config that Megatron's schedule reads, of a wrapped or bare model."""
    from megatron.core.utils import get_model_config

    return get_model_config(model)


def _check_wrapper(model: Any, groups: ParallelGroups) -> None:
    from megatron.core.distributed import DistributedDataParallel

    reducers = [m for m in _wrappers(model) if _reduces_gradients(m)]
    foreign = [m for m in reducers if not isinstance(m, DistributedDataParallel)]
    if foreign:
        name = f"{type(foreign[0]).__module__}.{type(foreign[0]).__qualname__}"
        raise ContractError(
            f"the model is wrapped in {name}, whose gradient averaging this factor was not proven "
            "for. Wrap it in megatron.core.distributed.DistributedDataParallel."
        )
    if not reducers and groups.dp_cp.size() > 1:
        raise ContractError(
            f"the model is not wrapped in Megatron's DistributedDataParallel, but "
            f"{groups.dp_cp.size()} ranks share the data: their gradients would never be averaged."
        )


def _wrappers(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        model = getattr(model, "module", None)


def _reduces_gradients(module: Any) -> bool:
    name = type(module).__name__
    return "DataParallel" in name or "FSDP" in name.upper() or "FullySharded" in name
