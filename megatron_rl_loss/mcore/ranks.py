"""Starts this process as a rank of torch.distributed and of Megatron's parallel state."""

from __future__ import annotations

import gc
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import LayoutError
from . import compat
from .cpu import use_cpu_ranks


def start_ranks(
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    seed: int = 0,
    timeout_s: float = 600,
) -> torch.device:
    """Joins the world that torchrun describes (or makes a world of one) and sets up the groups.

    Without CUDA it switches to gloo CPU ranks (`use_cpu_ranks`). A collective that waits longer
    than `timeout_s` raises instead of hanging.

    Returns:
        The device of this rank.

    Raises:
        LayoutError: the world size does not fit the parallel sizes, or there are groups already.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise LayoutError(
            "Megatron's parallel groups exist already in this process; call start_ranks once, or "
            "stop_ranks() before other sizes."
        )
    device = _device()
    if not dist.is_initialized():
        _join_world(device, timeout_s)
    check_world_size(
        dist.get_world_size(),
        tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size,
        expert_model_parallel_size * (expert_tensor_parallel_size or tensor_model_parallel_size)
        * pipeline_model_parallel_size,
    )  # fmt: skip
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    compat.forget_embedding_ranks()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return device


def stop_ranks() -> None:
    """Leaves Megatron's groups, so that `start_ranks` can make others in the same world.

    Megatron only forgets its groups; the groups' threads live on until they are destroyed.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    compat.forget_cached_models()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def check_world_size(world_size: int, model_size: int, expert_size: int = 1) -> None:
    """Raises `LayoutError` unless the world is a multiple of both model sizes.

    Args:
        world_size: number of ranks.
        model_size: tensor * pipeline * context parallel ranks of one copy of the model.
        expert_size: expert * expert-tensor * pipeline ranks of one copy of the experts.
    """
    for size, rule in (
        (model_size, "tensor * pipeline * context parallel size"),
        (expert_size, "expert * expert-tensor * pipeline parallel size"),
    ):
        if world_size % size:
            raise LayoutError(
                f"{world_size} ranks are not a multiple of {size} ({rule}). Start a multiple of "
                f"{size} ranks (torchrun --nproc-per-node), or change the parallel sizes."
            )


def join_world(timeout_s: float = 600) -> None:
    """Joins the world that torchrun describes, or makes a world of one; not a second time."""
    if not dist.is_initialized():
        _join_world(_device(), timeout_s)


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    use_cpu_ranks()
    return torch.device("cpu")


def _join_world(device: torch.device, timeout_s: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout
        )
