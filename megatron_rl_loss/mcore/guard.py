"""Refuses, before the first step, set-ups in which Megatron would scale the loss wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import ContractError
from . import compat
from .groups import ParallelGroups


def check_contract(model: Any, groups: ParallelGroups) -> None:
    """Raises `ContractError` unless gradients will come out as the contract says.

    Checked: Megatron-Core's version; that tensor-parallel weights are marked as such; that
    `calculate_per_token_loss`, if on, is proven for this model and was on when DDP was built; that
    gradients are reduced by Megatron's own DistributedDataParallel; that
    `finalize_model_grads_func` is set where ranks have to reduce something; that fp16 has a
    `grad_scale_func`.

    Args:
        model: the model (chunk) that the schedule hands to the forward step, as it is wrapped.
        groups: this rank's groups.
    """
    compat.megatron_version()
    config = model_config(model)
    check_flag(config)
    _check_wrapper(model, groups)
    _check_marks(model, groups)
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
    _check_ddp_flag(model, groups, config)


def check_flag(config: Any) -> None:
    """Raises `ContractError` if `calculate_per_token_loss` is on where no test proves the factor.

    With the flag on, the router multiplies its auxiliary losses by its number of tokens, and
    multi-token prediction its loss, and both count on finalizing to divide by the number of
    trained tokens. A 2-tuple leaves that number at 0.
    """
    if config.calculate_per_token_loss:
        for name in ("num_moe_experts", "mtp_num_layers"):
            if getattr(config, name, None):
                raise ContractError(
                    f"config.calculate_per_token_loss is True and {name} is "
                    f"{getattr(config, name)}: the auxiliary losses would come out as sums over "
                    "tokens, not means. Set calculate_per_token_loss=False before the model is "
                    "wrapped in DDP (some model providers switch it on when context parallelism "
                    "is used)."
                )


def per_token_flag(config: Any) -> bool:
    """Returns `calculate_per_token_loss`, checked by `check_flag`; cheap, for every call."""
    check_flag(config)
    return bool(config.calculate_per_token_loss)


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


def _check_marks(model: Any, groups: ParallelGroups) -> None:
    """Megatron counts unmarked weights on the first tensor-parallel rank only."""
    from megatron.core import tensor_parallel

    sharded = (
        tensor_parallel.ColumnParallelLinear,
        tensor_parallel.RowParallelLinear,
        tensor_parallel.VocabParallelEmbedding,
    )
    if groups.tp.size() == 1:
        return
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, sharded) or weight is None or not weight.requires_grad:
            continue
        if not getattr(weight, "tensor_model_parallel", False):
            raise ContractError(
                f"{name}.weight is sharded over {groups.tp.size()} tensor-parallel ranks but not "
                "marked so (weight.tensor_model_parallel): the gradient norm, and with it the "
                "clipping, would leave out all shards but the first. This is what "
                "perform_initialization=False does; keep it True and, to save time, pass an "
                "init_method that returns its argument."
            )


def _check_ddp_flag(model: Any, groups: ParallelGroups, config: Any) -> None:
    """DDP fixes its scaling when it is built; the schedule reads the flag on every call."""
    from megatron.core.distributed import DistributedDataParallel

    wrapper = next((m for m in _wrappers(model) if isinstance(m, DistributedDataParallel)), None)
    if wrapper is None or groups.dp_cp.size() == 1:
        return
    averages = wrapper.ddp_config.average_in_collective
    factors = {
        buffer.gradient_scaling_factor
        for buffer in [*wrapper.buffers, *wrapper.expert_parallel_buffers]
    }
    sums = not averages and factors == {1.0}
    if factors and sums != bool(config.calculate_per_token_loss):
        raise ContractError(
            f"config.calculate_per_token_loss is {config.calculate_per_token_loss}, but it was "
            f"{sums} when DistributedDataParallel was built, which therefore "
            f"{'sums' if sums else 'averages'} gradients. Set calculate_per_token_loss=False on "
            "the config before the model is wrapped, and do not change it afterwards."
        )


def _wrappers(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        model = getattr(model, "module", None)


def _reduces_gradients(module: Any) -> bool:
    name = type(module).__name__
    return "DataParallel" in name or "FSDP" in name.upper() or "FullySharded" in name
