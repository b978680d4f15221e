"""A Megatron-Core plugin for reinforcement learning of large language models.

The gradient of a mini-batch does not depend on how it is cut. Start with `make_forward_step`.

Names are imported when first used: importing the package loads neither Megatron nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "LOSSES": "losses.registry",
    "REDUCTIONS": "ops.reduction",
    "ConfigError": "errors",
    "ContractError": "errors",
    "ForwardStep": "mcore.forward_step",
    "InputError": "errors",
    "LayoutError": "errors",
    "MegatronRLLossError": "errors",
    "MicroBatchIterator": "mcore.micro_batches",
    "Objective": "losses.objective",
    "OffPolicy": "losses.off_policy",
    "TokenLoss": "types",
    "build_optimizer": "mcore.optimizer",
    "check_contract": "mcore.guard",
    "check_loss": "losses.contract_check",
    "group_advantages": "ops.advantages",
    "kl_penalty": "ops.kl",
    "make_forward_step": "mcore.forward_step",
    "masked_sum": "ops.reduction",
    "normalize_advantages": "parallel.token_weights",
    "preset_objective": "losses.presets",
    "reduce_metrics": "metrics",
    "schedule_factor": "mcore.scaling",
    "start_ranks": "mcore.ranks",
    "token_weights": "parallel.token_weights",
    "train_step": "mcore.train_step",
    "use_cpu_ranks": "mcore.cpu",
    "vocab_parallel_log_probs": "logprobs.vocab_parallel",
    "with_loss_weights": "mcore.micro_batches",
    "wrap_with_ddp": "mcore.optimizer",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from .errors import (
        ConfigError,
        ContractError,
        InputError,
        LayoutError,
        MegatronRLLossError,
    )
    from .logprobs.vocab_parallel import vocab_parallel_log_probs
    from .losses.contract_check import check_loss
    from .losses.objective import Objective
    from .losses.off_policy import OffPolicy
    from .losses.presets import preset_objective
    from .losses.registry import LOSSES
    from .mcore.cpu import use_cpu_ranks
    from .mcore.forward_step import ForwardStep, make_forward_step
    from .mcore.guard import check_contract
    from .mcore.micro_batches import MicroBatchIterator, with_loss_weights
    from .mcore.optimizer import build_optimizer, wrap_with_ddp
    from .mcore.ranks import start_ranks
    from .mcore.scaling import schedule_factor
    from .mcore.train_step import train_step
    from .metrics import reduce_metrics
    from .ops.advantages import group_advantages
    from .ops.kl import kl_penalty
    from .ops.reduction import REDUCTIONS, masked_sum
    from .parallel.token_weights import normalize_advantages, token_weights
    from .types import TokenLoss


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
