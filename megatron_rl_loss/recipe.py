"""From a config to what the main job and `pretrain()` have in common: advantages and adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config.schema import Config
from .config.validate import objective_settings
from .lora import LoRAConfig
from .losses.objective import Objective
from .ops.advantages import group_advantages
from .parallel.whitening import whiten
from .rollouts.sequences import AdvantageEstimator


def lora_settings(config: Config) -> LoRAConfig | None:
    """Returns the adapters' settings, None if all weights are trained.

    Raises:
        ConfigError: a setting is out of range.
    """
    lora = config.lora
    if lora.rank is None:
        return None
    return LoRAConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        expert_rank=lora.expert_rank,
        exclude=tuple(lora.exclude),
        seed=lora.seed,
        use_rslora=lora.use_rslora,
    )


def parallel_sizes(config: Config) -> dict[str, Any]:
    """Returns what `start_ranks` and `transformer_config` must agree on."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    return {name: getattr(config.parallel, name) for name in names}


def step_settings(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments of `make_forward_step` that the config alone gives."""
    objective = objective_settings(config.loss)
    return {
        **objective.pop("loss_settings"),
        **objective,
        "temperature": config.sampler.temperature,
        "lm_head": config.loss.lm_head,
        "memory_budget_bytes": config.loss.memory_budget_bytes,
    }


def reads_advantages(config: Config) -> bool:
    """Tells whether the loss reads advantages; supervised losses do not."""
    return "advantages" in Objective(**objective_settings(config.loss)).needs


def row_checks(config: Config) -> dict[str, Any]:
    """Returns what readers of rollout files ask of each row, beside sizes."""
    return {
        "drop_non_finite": config.rollouts.drop_non_finite,
        "need_reward": config.advantage.estimator != "none" or reads_advantages(config),
    }


def build_estimator(config: Config) -> AdvantageEstimator | None:
    """Returns (rewards [N], group ids [N], trained tokens [N]) -> advantages [N], or None."""
    advantage = config.advantage
    if advantage.estimator in ("gae", "none"):
        return None
    settings: dict[str, Any] = {"estimator": advantage.estimator}
    if advantage.estimator == "grpo":
        settings["normalize_by_std"] = advantage.normalize_by_std
    if advantage.k is not None:
        settings["k"] = advantage.k

    def estimate(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
        if advantage.estimator == "opo":
            settings["num_tokens"] = num_tokens
        advantages = group_advantages(rewards, group_ids, **settings)
        if not advantage.estimator.startswith("reinforce_plus_plus"):
            return advantages
        mask = torch.arange(int(num_tokens.max())) < num_tokens.unsqueeze(1)
        return whiten(advantages.unsqueeze(1).expand(mask.shape), mask)[:, 0]

    return estimate
