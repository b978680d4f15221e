"""Lets the real Megatron-Core run on gloo CPU ranks.

Megatron-Core names CUDA in a few dozen places (device keywords, streams, random states, type
strings). `use_cpu_ranks()` answers each of them with the CPU's equivalent; the schedules, DDP,
the optimizers and the layers stay Megatron's own. It is called explicitly, never on import, and
refuses to act where CUDA is there. Written against megatron-core 0.13.1 to 0.19.2.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ..errors import ContractError
from . import compat

_CPU = torch.device("cpu")
_active: _CudaMeansCpu | None = None


def use_cpu_ranks() -> None:
    """Redirects Megatron-Core's CUDA calls to the CPU, for this process and for good.

    Call it once, before the first megatron import that builds anything. Calling it again does
    nothing. Afterwards `init_process_group("gloo")` and Megatron's own functions work as on GPU.

    Raises:
        ContractError: CUDA is available; CPU ranks would hide a GPU that could be used.
    """
    global _active
    if _active is not None:
        return
    if torch.cuda.is_available():
        raise ContractError(
            "use_cpu_ranks() is for machines without CUDA, and CUDA is available here. Leave the "
            "call out, or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )
    _redirect_cuda_module()
    _redirect_collectives()
    compat.redirect_megatron_rng(torch.get_rng_state, torch.set_rng_state)
    compat.bind_missing_te_gemm()
    _active = _CudaMeansCpu()
    _active.__enter__()


def cpu_ranks_active() -> bool:
    """Tells whether `use_cpu_ranks()` was called in this process."""
    return _active is not None


class _CudaMeansCpu(TorchFunctionMode):
    """Reads every `device="cuda"` as CPU, and `Tensor.type()` with CUDA's spelling.

    Megatron's optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"`.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_as_cpu(arg) for arg in args)
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs = {
                name: _as_cpu(value) for name, value in kwargs.items() if name != "pin_memory"
            }
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _as_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return _CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return value


class _Stream:
    """Stands for a CUDA stream where everything runs in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    """Stands for a CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _redirect_cuda_module() -> None:
    # each a function of its own: torch.compile's tables refuse one object under two names
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "device_count": lambda: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = _get_rng_state
    torch.cuda.random.set_rng_state = _set_rng_state


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _redirect_collectives() -> None:
    """Gloo wants split sizes as lists; Megatron's token dispatcher may hand over tensors."""
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
        group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        return original(
            output,
            input,
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            group,
            async_op,
        )

    _replace_everywhere(original, all_to_all_single)


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _replace_everywhere(original: Callable, replacement: Callable) -> None:
    name = original.__name__
    for module in (dist, sys.modules["torch.distributed.distributed_c10d"]):
        setattr(module, name, replacement)
