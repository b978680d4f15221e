"""Checks of a whole config: ranges, choices, and settings that must fit together.

Nothing here needs a model, Megatron or `torch.distributed`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from ..errors import ConfigError, LayoutError
from ..logprobs.head_plan import LM_HEADS
from ..losses.objective import Objective
from ..losses.off_policy import OffPolicy
from ..losses.registry import LOSSES, loss_spec
from ..ops.advantages import ADVANTAGE_ESTIMATORS
from ..ops.kl import KL_ESTIMATORS
from ..ops.reduction import REDUCTIONS
from ..types import PER_TOKEN_SET_FIELDS
from .keys import nearest, raise_problems
from .schema import Config, LossConfig

DTYPES = ("fp32", "bf16")
RECOMPUTE = ("none", "selective", "full")
FROM_FILES = ("files", "stream", "watch")
CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": DTYPES,
    "model.recompute": RECOMPUTE,
    "sampler.dtype": DTYPES,
    "rollouts.source": ("sampler", *FROM_FILES),
    "advantage.estimator": (*ADVANTAGE_ESTIMATORS, "gae", "none"),
    "reward.kl_estimator": tuple(KL_ESTIMATORS),
    "loss.reduction": REDUCTIONS,
    "loss.kl_estimator": tuple(KL_ESTIMATORS),
    "loss.lm_head": LM_HEADS,
    "logging.wandb_mode": ("offline", "online", "disabled"),
}

# What rollouts and trainer can give to a loss; the last ones only rollouts from files.
_TENSORS = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
_FROM_FILES_ONLY = PER_TOKEN_SET_FIELDS

_Range = tuple[str, Callable[[float], bool]]


def _at_least(least: float) -> _Range:
    return f"at least {least}", lambda value: value >= least


_POSITIVE: _Range = ("greater than 0", lambda value: value > 0)
_FRACTION: _Range = ("in [0, 1]", lambda value: 0 <= value <= 1)
_FINITE: _Range = ("finite", math.isfinite)
RANGES: dict[str, _Range] = {
    "run.seed": _at_least(0),
    "run.steps": _at_least(1),
    "run.log_interval": _at_least(1),
    "run.hang_timeout": _POSITIVE,
    "lora.rank": _at_least(1),
    "lora.alpha": _POSITIVE,
    "lora.expert_rank": _at_least(1),
    "lora.seed": _at_least(0),
    "parallel.tensor_model_parallel_size": _at_least(1),
    "parallel.pipeline_model_parallel_size": _at_least(1),
    "parallel.virtual_pipeline_model_parallel_size": _at_least(2),
    "parallel.context_parallel_size": _at_least(1),
    "parallel.expert_model_parallel_size": _at_least(1),
    "parallel.expert_tensor_parallel_size": _at_least(1),
    "model.moe_aux_loss_coef": _at_least(0),
    "rollouts.per_step": _at_least(1),
    "rollouts.max_staleness": _at_least(0),
    "rollouts.wait_timeout": _POSITIVE,
    "rollouts.export_interval": _at_least(1),
    "sampler.prompts_per_step": _at_least(1),
    "sampler.samples_per_prompt": _at_least(1),
    "sampler.max_new_tokens": _at_least(1),
    "sampler.temperature": _POSITIVE,
    "sampler.prompts_per_batch": _at_least(1),
    "task.size": _at_least(1),
    "reward.correct_score": _FINITE,
    "reward.format_reward": _FINITE,
    "advantage.k": _at_least(1),
    "reward.kl_coef": _at_least(0),
    "reward.kl_target": _POSITIVE,
    "reward.kl_horizon": _POSITIVE,
    "critic.lr": _at_least(0),
    "critic.value_clip": _POSITIVE,
    "critic.discount": _FRACTION,
    "critic.gae_lambda": _FRACTION,
    "loss.max_seq_len": _at_least(1),
    "loss.kl_target": _POSITIVE,
    "loss.kl_horizon": _POSITIVE,
    "loss.entropy_target": _POSITIVE,
    "loss.entropy_step": _POSITIVE,
    "loss.entropy_coef_max": _POSITIVE,
    "loss.memory_budget_bytes": _at_least(0),
    "batch.micro_batch_size": _at_least(1),
    "batch.max_tokens_per_microbatch": _at_least(1),
    "batch.mini_batches_per_step": _at_least(1),
    "batch.epochs": _at_least(1),
    "optimizer.lr": _at_least(0),
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _at_least(0),
    "optimizer.clip_grad": _at_least(0),
    "optimizer.warmup_steps": _at_least(0),
    "checkpoint.interval": _at_least(1),
    "checkpoint.keep_last": _at_least(1),
}


def check_config(config: Config) -> None:
    """Raises `ConfigError` with one line for every problem of the config."""
    raise_problems([problem for rule in _RULES for problem in rule(config)])


def check_layout(config: Config, world_size: int) -> int:
    """Returns the data-parallel size (without context parallelism) of a world.

    Raises:
        LayoutError: the world size does not fit the parallel sizes.
    """
    sizes = config.parallel
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    cp, ep = sizes.context_parallel_size, sizes.expert_model_parallel_size
    etp = sizes.expert_tensor_parallel_size or tp
    if world_size % (tp * pp * cp):
        raise LayoutError(
            f"{world_size} ranks are no multiple of tensor x pipeline x context parallel size "
            f"= {tp} x {pp} x {cp} = {tp * pp * cp}; change the number of ranks or parallel.*."
        )
    if world_size % (ep * etp * pp):
        raise LayoutError(
            f"{world_size} ranks are no multiple of expert x expert-tensor x pipeline parallel "
            f"size = {ep} x {etp} x {pp} = {ep * etp * pp}; change the number of ranks or "
            "parallel.*."
        )
    return world_size // (tp * pp * cp)


def rollouts_per_step(config: Config) -> int:
    """Returns the number of rollouts in a step, over all ranks."""
    if config.rollouts.source in FROM_FILES:
        return config.rollouts.per_step or 0
    return config.sampler.prompts_per_step * config.sampler.samples_per_prompt


def _choices(config: Config) -> Iterator[str]:
    for path, known in CHOICES.items():
        value = attrgetter(path)(config)
        if value not in known:
            yield f"{path}: unknown {value!r}; {nearest(value, known)}One of: {', '.join(known)}."


def _ranges(config: Config) -> Iterator[str]:
    for path, (text, fits) in RANGES.items():
        value = attrgetter(path)(config)
        if value is not None and not (math.isfinite(value) and fits(value)):
            yield f"{path}: must be {text}, got {value}."
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        yield f"optimizer.betas: must be two numbers in [0, 1), got {betas}."


def _parallel(config: Config) -> Iterator[str]:
    sizes = config.parallel
    if sizes.sequence_parallel and sizes.tensor_model_parallel_size == 1:
        yield (
            "parallel.sequence_parallel: needs parallel.tensor_model_parallel_size > 1, got 1; it "
            "splits over the same ranks."
        )
    if sizes.virtual_pipeline_model_parallel_size and sizes.pipeline_model_parallel_size == 1:
        yield (
            "parallel.virtual_pipeline_model_parallel_size: needs "
            "parallel.pipeline_model_parallel_size > 1, got 1; set it to null."
        )


def _source(config: Config) -> Iterator[str]:
    source = config.rollouts.source
    if source in FROM_FILES:
        for name in ("path", "per_step"):
            if getattr(config.rollouts, name) is None:
                yield f"rollouts.{name}: is needed with rollouts.source={source}."
        if config.rollouts.export_dir is not None and source != "watch":
            yield "rollouts.export_dir: is only written with rollouts.source=watch."
    elif config.rollouts.source == "sampler":
        if config.rollouts.path is not None:
            yield (
                "rollouts.path: is only read with rollouts.source=files, stream or watch; set one "
                "or the other."
            )
        yield from _task(config)


def _task(config: Config) -> Iterator[str]:
    task, reward = config.task, config.reward
    if (task.name is None) == (task.path is None):
        which = "neither is given" if task.name is None else "both are given"
        yield f"task.name, task.path: the sampler needs exactly one of them; {which}."
    if task.path is not None and reward.fn is None:
        yield "reward.fn: is needed with task.path; a prompt file has no rewards of its own."
    if task.path is not None and task.params:
        yield "task.params: belong to task.name, but task.path is given."
    if reward.fn is not None and ":" not in reward.fn:
        yield f"reward.fn: expected 'my_pkg.my_mod:reward_fn', got {reward.fn!r}."


def _advantage(config: Config) -> Iterator[str]:
    advantage, from_sampler = config.advantage, config.rollouts.source == "sampler"
    if advantage.estimator == "none" and from_sampler:
        yield (
            "advantage.estimator: 'none' takes advantages from rollout files, but "
            "rollouts.source=sampler has rewards only; choose an estimator."
        )
    if advantage.estimator == "pass_at_k" and advantage.k is None:
        yield "advantage.k: is needed with advantage.estimator=pass_at_k."
    if advantage.estimator != "pass_at_k" and advantage.k is not None:
        yield f"advantage.k: is not read by advantage.estimator={advantage.estimator}."
    if advantage.estimator != "grpo" and not advantage.normalize_by_std:
        yield (
            "advantage.normalize_by_std: false is only read by advantage.estimator=grpo, got "
            f"{advantage.estimator}."
        )
    if config.reward.kl_coef and advantage.estimator != "gae":
        yield (
            "reward.kl_coef: puts the KL into the reward of each token, which only "
            f"advantage.estimator=gae reads, got {advantage.estimator}; use loss.kl_coef."
        )
    compares = advantage.estimator not in ("none", "gae", "reinforce_plus_plus")
    if compares and from_sampler and config.sampler.samples_per_prompt < 2:
        yield (
            f"sampler.samples_per_prompt: advantage.estimator={advantage.estimator} compares the "
            "responses to one prompt and needs at least 2, got "
            f"{config.sampler.samples_per_prompt}."
        )


def _loss(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.reduction == "seq_mean_token_sum_norm" and loss.max_seq_len is None:
        yield (
            "loss.max_seq_len: is needed with loss.reduction=seq_mean_token_sum_norm: the fixed "
            "length in tokens that every sequence is divided by."
        )
    try:
        spec = loss_spec(loss.name)
    except ConfigError as error:
        yield f"loss.name: {nearest(loss.name, LOSSES)}{error}"
        return
    off_policy_names = inspect.signature(OffPolicy).parameters
    problems = [
        *_unknown("loss.settings", loss.settings, spec.settings),
        *_no_numbers("loss.settings", loss.settings, spec.settings),
        *_unknown("loss.off_policy", loss.off_policy, off_policy_names),
    ]
    yield from problems
    if not problems and loss.kl_estimator in KL_ESTIMATORS:
        yield from _objective(config)


def objective_settings(loss: LossConfig) -> dict[str, Any]:
    """Returns the keyword arguments of `Objective` that the loss section gives."""
    names = ("kl_coef", "kl_estimator", "kl_is_weighted", "entropy_coef", "entropy_max")
    return {
        "loss": loss.name,
        "loss_settings": loss.settings,
        "off_policy": loss.off_policy or None,
        **{name: getattr(loss, name) for name in names},
    }


def _objective(config: Config) -> Iterator[str]:
    loss = config.loss
    try:
        objective = Objective(**objective_settings(loss))
        if loss.lm_head == "fused_forward":
            objective.check_token_level()
    except (ConfigError, TypeError, ValueError) as error:
        yield f"loss: {error}"
        return
    others = [name for name in objective.needs if name not in _TENSORS + _FROM_FILES_ONLY]
    if others:
        yield (
            f"loss.name: {loss.name!r} reads {', '.join(others)}, which rollouts do not carry "
            f"(they give {', '.join(_TENSORS)}); use it with a loop of your own."
        )
    of_files = [name for name in objective.needs if name in _FROM_FILES_ONLY]
    if of_files and config.rollouts.source == "sampler":
        yield (
            f"rollouts.source: {loss.name!r} reads {', '.join(of_files)}, which sampled rollouts "
            f"do not carry; give them in rollout files (one of: {', '.join(FROM_FILES)})."
        )
    if "advantages" not in objective.needs and config.advantage.estimator != "none":
        yield (
            f"advantage.estimator: the loss {loss.name!r} reads no advantages, so rewards would "
            f"have no effect; set it to none, got {config.advantage.estimator}."
        )


def _adaptive(config: Config) -> Iterator[str]:
    for name, section in (("reward", config.reward), ("loss", config.loss)):
        if section.kl_target is not None and not section.kl_coef:
            yield f"{name}.kl_target: needs {name}.kl_coef > 0 to start from, got 0."
    loss = config.loss
    if loss.entropy_target is not None and not 0 <= loss.entropy_coef <= loss.entropy_coef_max:
        yield (
            f"loss.entropy_coef: with loss.entropy_target it must be in [0, "
            f"loss.entropy_coef_max={loss.entropy_coef_max}], got {loss.entropy_coef}."
        )


def _batch(config: Config) -> Iterator[str]:
    batch = config.batch
    if (batch.micro_batch_size is None) == (batch.max_tokens_per_microbatch is None):
        which = "neither is" if batch.micro_batch_size is None else "both are"
        yield (
            "batch.micro_batch_size, batch.max_tokens_per_microbatch: exactly one is needed; "
            f"{which} given."
        )
    rollouts, parts = rollouts_per_step(config), batch.mini_batches_per_step
    if rollouts > 0 and parts > 0 and rollouts % parts:
        yield (
            f"batch.mini_batches_per_step: {rollouts} rollouts of a step do not split into {parts} "
            "mini-batches of one size."
        )


def _unknown(path: str, given: Iterable[Any], known: Iterable[str]) -> list[str]:
    known = list(known)
    return [
        f"{path}.{name}: unknown; {nearest(str(name), known)}The settings: "
        f"{', '.join(known) or 'none'}."
        for name in given
        if name not in known
    ]


def _no_numbers(path: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Reports values that are no numbers where the default is one."""

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    return [
        f"{path}.{name}: expected a number, got {value!r}."
        for name, value in given.items()
        if is_number(defaults.get(name)) and not is_number(value)
    ]


_RULES = (_choices, _ranges, _parallel, _source, _advantage, _loss, _adaptive, _batch)
