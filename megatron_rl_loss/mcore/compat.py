"""What differs between Megatron-Core versions, each with the version it is about.

No other file may ask for a version or catch an ImportError of Megatron's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ContractError

OLDEST_VERSION = (0, 13)
TESTED_VERSIONS = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.0", "0.18.0", "0.19.2")


@functools.cache
def megatron_version() -> tuple[int, ...]:
    """Returns Megatron-Core's version as numbers, e.g. (0, 16, 1); warns of an untested one, once.

    Raises:
        ContractError: Megatron-Core is missing or older than 0.13.
    """
    try:
        from megatron.core import __version__
    except ImportError as error:
        raise ContractError(
            "megatron-core is not installed: pip install 'megatron-core>=0.13'."
        ) from error
    numbers = check_version(__version__)
    # From 0.18 on, Megatron adds "+<commit>" of whatever git repository it is installed in.
    if __version__.partition("+")[0] not in TESTED_VERSIONS:
        warnings.warn(
            f"megatron-core {__version__} was not tested with this package (tested: "
            f"{', '.join(TESTED_VERSIONS)}). Check your set-up with `megatron-rl-loss audit`.",
            stacklevel=2,
        )
    return numbers


def check_version(version: str) -> tuple[int, ...]:
    """Returns `version` as numbers, or raises `ContractError` if it is older than 0.13.

    Before 0.13 the schedule scaled a loss by other factors (see README, "Limits").

    >>> check_version("0.16.1rc0")
    (0, 16, 1)
    """
    from packaging.version import Version

    numbers = Version(version).release
    if numbers[:2] < OLDEST_VERSION:
        raise ContractError(
            f"megatron-core {version} is older than 0.13, where the schedule scales losses by "
            "other factors. Install megatron-core>=0.13."
        )
    return numbers


@functools.cache
def has_transformer_engine() -> bool:
    """Tells whether Transformer Engine imports (it needs CUDA)."""
    return torch.cuda.is_available() and _imports("transformer_engine.pytorch")


@functools.cache
def has_nvidia_apex() -> bool:
    """Tells whether NVIDIA Apex is there, by its modules.

    PyPI's package called `apex` is an unrelated web toolkit, so its name proves nothing.
    """
    return _imports("apex.optimizers") and _imports("apex.multi_tensor_apply")


@functools.cache
def has_gradient_accumulation_fusion() -> bool:
    """Tells whether the fused weight-gradient kernel of NVIDIA Apex is there."""
    return torch.cuda.is_available() and _imports("fused_weight_gradient_mlp_cuda")


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # a broken CUDA extension raises OSError, RuntimeError and others
        return False
    return True


def redirect_megatron_rng(
    get_state: Callable[[], torch.Tensor], set_state: Callable[[torch.Tensor], None]
) -> None:
    """Makes Megatron's random-state tracker use the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: get_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: set_state(state)


def bind_missing_te_gemm() -> None:
    """0.16.1: `router_gating_linear` names `te_general_gemm`, unbound where TE is missing."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def forget_embedding_ranks() -> None:
    """Up to 0.19 `destroy_model_parallel` keeps the list of the ranks that hold the embedding.

    A middle stage of the next layout may then think that it holds one; 0.13 fails on that.
    """
    from megatron.core import parallel_state

    parallel_state._EMBEDDING_GLOBAL_RANKS = None


def mark_expert_parameters(model: Any) -> None:
    """Says of each expert's weight whether its gradient is reduced over the experts' ranks.

    Up to 0.18 Megatron asks for expert parallelism only. Expert-tensor ranks that differ from the
    tensor ranks change the groups too: without the mark, gradients of some tokens are lost.
    """
    from megatron.core import parallel_state

    ep_size = parallel_state.get_expert_model_parallel_world_size()
    etp_size = parallel_state.get_expert_tensor_parallel_world_size()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = ep_size == 1 and etp_size == tp_size


def call_model(model: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a Megatron model for logits in the model's own dtype.

    `Float16Module.forward` upcasts its output to fp32 unless told not to (0.16: `fp32_output`),
    which would cost 4 bytes per logit; the log-probs take fp32 arithmetic anyway.
    """
    if _takes_fp32_output(model):
        kwargs["fp32_output"] = False
    return model(*args, **kwargs)


def _takes_fp32_output(model: Any) -> bool:
    import inspect

    from megatron.core.transformer.module import Float16Module

    while hasattr(model, "module"):
        if isinstance(model, Float16Module):
            return "fp32_output" in inspect.signature(Float16Module.forward).parameters
        model = model.module
    return False


def has_output_processor(gpt_model: Any) -> bool:
    """Tells whether the model takes a hook in place of its output layer (newer than 0.18)."""
    import inspect

    return "output_processor" in inspect.signature(type(gpt_model).forward).parameters


def forget_cached_models() -> None:
    """Empties the caches that keep models, and with them their process groups, alive.

    `RotaryEmbedding.forward` is an `lru_cache` over (self, length): seen in 0.13 to 0.16.
    """
    from megatron.core.models.common.embeddings import rotary_pos_embedding as rotary

    for name in dir(rotary):
        clear = getattr(getattr(getattr(rotary, name), "forward", None), "cache_clear", None)
        if clear is not None:
            clear()


def checkpoint_metadata() -> dict[str, Any]:
    """Returns what Megatron's `sharded_state_dict` methods are told, for any layout on loading.

    The distributed optimizer has formats that only load on the layout they were saved on; the one
    for all layouts is `fully_reshardable` from 0.15 on, `fully_sharded_model_space` before.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    formats = getattr(Optimizer, "checkpoint_fully_reshardable_formats", set())
    kind = "fully_reshardable" if "fully_reshardable" in formats else "fully_sharded_model_space"
    return {"distrib_optim_sharding_type": kind}


def bind_typing_override() -> None:
    """0.19's `megatron.training` takes `override` from `typing`, which has it from 3.12 on."""
    import typing

    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]


def fill_adam_state(optimizer: Any) -> None:
    """Gives torch's Adam inside Megatron's distributed optimizers a state before its first step.

    Without Transformer Engine and Apex, `DistributedOptimizer.state_dict` asserts that there is
    one, also when the state dict is for loading: seen in 0.16.1.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if not isinstance(one, DistributedOptimizer) or not isinstance(inner, torch.optim.Adam):
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def save_strategy() -> Any:
    """Returns the class that a writer of distributed checkpoints derives from.

    0.19 dropped the abstract one and asks for a `TorchDistSaveShardedStrategy`.
    """
    try:
        from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
    except ImportError:
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        return TorchDistSaveShardedStrategy
    return AsyncSaveShardedStrategy


def load_optimizer_state(optimizer: Any, state: Any) -> None:
    """Loads a loaded sharded state dict into Megatron's optimizer.

    Without Transformer Engine and Apex, `DistributedOptimizer` restores the step of torch's Adam,
    then fails as it is not among the sharded tensors; and all parameters share one step, which
    each of them would count up: seen in 0.16.1.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patched = []
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if isinstance(one, DistributedOptimizer) and isinstance(inner, torch.optim.Adam):
            one._set_main_param_and_optimizer_states = functools.partial(_set_with_step, one)
            patched.append(one)
    try:
        optimizer.load_state_dict(state)
    finally:
        for one in patched:
            del one._set_main_param_and_optimizer_states
    for one in patched:
        for parameter_state in one.optimizer.state.values():
            parameter_state["step"] = parameter_state["step"].clone()


def _set_with_step(optimizer: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    own = optimizer._get_main_param_and_optimizer_states(parameter)
    type(optimizer)._set_main_param_and_optimizer_states(
        optimizer, parameter, {"step": own["step"], **tensors}
    )


def leave_out_missing_makefile() -> None:
    """0.16 to 0.19: the wheel lacks the Makefile that `pretrain()` builds data-set helpers with.

    Only Megatron's own data sets need the helpers, which the wheel has compiled already.
    """
    from pathlib import Path

    from megatron.core.datasets import utils

    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = lambda: None
