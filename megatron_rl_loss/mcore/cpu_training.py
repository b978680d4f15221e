"""Lets `megatron.training.pretrain()` run on gloo CPU ranks, for tests and first tries.

On top of `use_cpu_ranks()` it leaves out what only a GPU has: the check for one at the start and
the warm-up of fused kernels. Called explicitly, before `run_pretrain`. Written against 0.19.2.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from . import compat
from .cpu import use_cpu_ranks
from .ranks import join_world


def use_cpu_training() -> None:
    """Redirects `megatron.training` to the CPU, for this process and for good.

    It also joins the world that torchrun describes (or makes a world of one). Start Megatron with
    `CPU_ARGUMENTS`, which leave out what needs a GPU.

    Raises:
        ContractError: CUDA is available.
    """
    use_cpu_ranks()
    compat.bind_typing_override()
    import megatron.training.training as training

    if getattr(training, "_on_cpu_ranks", False):
        return
    join_world()
    torch.cuda.device_count = lambda: 1  # Megatron makes its groups only where there is a device
    torch.cuda.get_device_properties = lambda device=None: _NEWEST
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    training.set_jit_fusion_options = _nothing
    training._on_cpu_ranks = True


CPU_ARGUMENTS = (
    *("--distributed-backend", "gloo"),
    *("--transformer-impl", "local"),
    *("--attention-backend", "unfused"),
    *("--num-workers", "0"),
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)


# Older devices than 10 must have CUDA_DEVICE_MAX_CONNECTIONS=1, by Megatron's check of arguments.
_NEWEST = SimpleNamespace(name="CPU", major=10, minor=0)


def _nothing(*args: Any, **kwargs: Any) -> None: ...
