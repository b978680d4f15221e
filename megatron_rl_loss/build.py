"""From a config to objects: the only place below the main job that reads the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config.schema import Config
from .config.validate import rollouts_per_step
from .errors import InputError
from .lora import LoRAConfig, apply_lora, disabled, merged
from .mcore.checkpoint import Checkpointer
from .mcore.checkpoint_state import Trained
from .mcore.forward_step import ForwardStep, make_forward_step
from .mcore.groups import parallel_groups
from .mcore.model import build_gpt_model, padded_vocab_size, transformer_config
from .mcore.model_spec import ModelSpec, model_spec_from_hf
from .mcore.optimizer import build_optimizer, build_scheduler, wrap_with_ddp
from .mcore.ranks import start_ranks
from .mcore.weights import export_hf_weights, load_hf_weights
from .ops.advantages import group_advantages
from .parallel.whitening import whiten
from .rollout_source import FileRollouts, RolloutSource, SampledRollouts
from .rollouts.files import RolloutFiles
from .rollouts.hf_model import check_hf_model, load_hf_model
from .rollouts.prompts import PromptFile, PromptSource
from .rollouts.rewards import ReasoningGymTask, RewardFn, load_reward_fn
from .rollouts.sampler import Sampler
from .trainer import AdvantageEstimator, Trainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """Everything the main loop needs."""

    trainer: Trainer
    source: RolloutSource
    spec: ModelSpec
    hf_config: Any
    checkpoints: Checkpointer | None = None


def build_job(config: Config) -> Job:
    """Starts this rank, loads the model, and builds optimizer, forward step and rollout source.

    Communicates: every rank must call it with the same config.
    """
    start_ranks(**_parallel_sizes(config), seed=config.run.seed)
    hf_model, tokenizer = load_hf_model(config.model.path)
    spec = model_spec_from_hf(hf_model.config)
    weights = hf_model.state_dict()
    trainer = build_trainer(config, spec, weights)
    source = build_source(config, spec, trainer, hf_model, tokenizer)
    return Job(trainer, source, spec, hf_model.config, build_checkpointer(config, spec, trainer))


def check_inputs(config: Config) -> None:
    """Raises if a file, task or reward function of the config is not there; loads no model.

    Raises:
        InputError, ConfigError: naming what is missing.
    """
    check_hf_model(config.model.path)
    lora_settings(config)
    if config.rollouts.source == "sampler":
        build_task(config)
    elif not Path(config.rollouts.path).exists():
        raise InputError(f"rollouts.path {config.rollouts.path}: no such file or folder.")


def build_trainer(config: Config, spec: ModelSpec, weights: Any) -> Trainer:
    bare = _model_chunks(config, spec, weights)
    lora = lora_settings(config)
    if lora is not None:
        apply_lora(bare, lora)
    chunks = wrap_with_ddp(
        bare,
        use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
    )
    optimizer = build_optimizer(
        chunks,
        lr=config.optimizer.lr,
        betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        clip_grad=config.optimizer.clip_grad,
    )
    forward_step = build_forward_step(config, spec)
    return Trainer(
        chunks=chunks,
        optimizer=optimizer,
        scheduler=build_scheduler(
            optimizer,
            lr=config.optimizer.lr,
            warmup_steps=config.optimizer.warmup_steps,
            total_steps=config.run.steps * updates_per_step(config),
        ),
        forward_step=forward_step,
        groups=parallel_groups(),
        estimator=build_estimator(config),
        cutting=_cutting(config),
        num_mini_batches=config.batch.mini_batches_per_step,
        num_epochs=config.batch.epochs,
        **_reference(config, spec, weights, chunks, forward_step),
    )


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


def build_forward_step(config: Config, spec: ModelSpec) -> ForwardStep:
    loss = config.loss
    return make_forward_step(
        loss.name,
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
        kl_is_weighted=loss.kl_is_weighted,
        entropy_coef=loss.entropy_coef,
        entropy_max=loss.entropy_max,
        off_policy=loss.off_policy or None,
        temperature=config.sampler.temperature,
        on_policy=updates_per_step(config) == 1 and not loss.off_policy,
        vocab_size=spec.vocab_size,
        lm_head=loss.lm_head,
        memory_budget_bytes=loss.memory_budget_bytes,
        **loss.settings,
    )


def updates_per_step(config: Config) -> int:
    return config.batch.mini_batches_per_step * config.batch.epochs


def build_estimator(config: Config) -> AdvantageEstimator | None:
    """Returns (rewards [N], group ids [N], trained tokens [N]) -> advantages [N], or None."""
    advantage = config.advantage
    if advantage.estimator == "none":
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


def build_checkpointer(config: Config, spec: ModelSpec, trainer: Trainer) -> Checkpointer | None:
    """Returns what saves and resumes the run, None without `checkpoint.interval`."""
    checkpoint = config.checkpoint
    if checkpoint.interval is None:
        return None
    return Checkpointer(
        checkpoint.dir or Path(config.run.dir) / "checkpoints",
        {"policy": Trained(trainer.chunks, trainer.optimizer, trainer.scheduler)},
        interval=checkpoint.interval,
        keep_last=checkpoint.keep_last,
        asynchronous=checkpoint.asynchronous,
        identity={"model": asdict(spec), "order of the data": _data_order(config)},
        about={"layout": _parallel_sizes(config)},
    )


def _data_order(config: Config) -> dict[str, Any]:
    """Returns the settings that, with the number of steps done, say which data comes next."""
    order = {"run.seed": config.run.seed, "rollouts.source": config.rollouts.source}
    if config.rollouts.source == "files":
        return order | {
            "rollouts.per_step": config.rollouts.per_step,
            "rollouts.shuffle": config.rollouts.shuffle,
        }
    return order | {"sampler.prompts_per_step": config.sampler.prompts_per_step}


def build_source(
    config: Config, spec: ModelSpec, trainer: Trainer, hf_model: Any, tokenizer: Any
) -> RolloutSource:
    if config.rollouts.source == "files":
        return build_file_source(config, spec)
    sampler_model = hf_model.to(DTYPES[config.sampler.dtype])
    prompts, reward_fn = build_task(config)
    sampler = Sampler(
        sampler_model,
        tokenizer,
        max_new_tokens=config.sampler.max_new_tokens,
        temperature=config.sampler.temperature,
        samples_per_prompt=config.sampler.samples_per_prompt,
        seed=config.run.seed,
        prompts_per_batch=config.sampler.prompts_per_batch,
    )
    return SampledRollouts(
        sampler,
        prompts,
        reward_fn,
        prompts_per_step=config.sampler.prompts_per_step,
        prompts_per_batch=config.sampler.prompts_per_batch,
        export_weights=partial(export_hf_weights, exported_chunks(config, trainer.chunks), spec),
    )


def build_file_source(config: Config, spec: ModelSpec) -> FileRollouts:
    files = RolloutFiles(
        config.rollouts.path,
        vocab_size=spec.vocab_size,
        drop_non_finite=config.rollouts.drop_non_finite,
    )
    return FileRollouts(
        files,
        per_step=rollouts_per_step(config),
        shuffle_seed=config.run.seed if config.rollouts.shuffle else None,
        whole_groups=config.advantage.estimator != "none",
    )


def build_task(config: Config) -> tuple[PromptSource, RewardFn]:
    """Returns where the prompts come from and what rewards a response."""
    task, reward = config.task, config.reward
    reward_fn = load_reward_fn(reward.fn) if reward.fn else None
    wording = {"system_prompt": task.system_prompt, "suffix": task.suffix}
    if task.path is not None:
        assert reward_fn is not None, "check_config asks for reward.fn with task.path"
        return PromptFile(task.path, seed=config.run.seed, **wording), reward_fn
    gym = ReasoningGymTask(
        task.name,
        seed=config.run.seed,
        size=task.size,
        params=task.params,
        correct_score=reward.correct_score,
        format_pattern=reward.format_pattern,
        format_reward=reward.format_reward,
        **wording,
    )
    return gym, reward_fn or gym.reward


def _model_chunks(config: Config, spec: ModelSpec, weights: Any) -> Sequence[Any]:
    megatron_config = transformer_config(
        spec,
        bf16=config.model.dtype == "bf16",
        sequence_parallel=config.parallel.sequence_parallel,
        # The weights are loaded right after. perform_initialization=False would be quicker to
        # say, but then Megatron does not mark sharded weights, and counts them once in the norm.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        **_dense_sizes(config),
    )
    rows = padded_vocab_size(spec.vocab_size, config.parallel.tensor_model_parallel_size)
    chunks = build_gpt_model(spec, megatron_config, padded_vocab_size=rows)
    load_hf_weights(chunks, weights, spec)
    return chunks


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


def _reference(
    config: Config,
    spec: ModelSpec,
    weights: Any,
    chunks: Sequence[Any],
    forward_step: ForwardStep,
) -> dict[str, Any]:
    """Returns the trainer's `reference`: with LoRA the model without its adapters, else a second
    copy of the initial model, frozen; nothing if the loss does not ask."""
    if "ref_log_probs" not in forward_step.objective.needs:
        return {}
    if config.lora.rank is not None:
        return {"reference": chunks, "reference_mode": partial(disabled, chunks)}
    copy = _model_chunks(config, spec, weights)
    for chunk in copy:
        chunk.requires_grad_(False)
    return {"reference": copy}


def exported_chunks(config: Config, chunks: Sequence[Any]) -> Sequence[Any]:
    """Returns what `export_hf_weights` reads: with LoRA, views with the adapters merged in."""
    return chunks if config.lora.rank is None else merged(chunks)


def _dense_sizes(config: Config) -> dict[str, Any]:
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
    )
    return {name: getattr(config.parallel, name) for name in names}


def _parallel_sizes(config: Config) -> dict[str, Any]:
    return _dense_sizes(config) | {
        "expert_model_parallel_size": config.parallel.expert_model_parallel_size
    }


def _cutting(config: Config) -> dict[str, Any]:
    return {
        "reduction": config.loss.reduction,
        "max_seq_len": config.loss.max_seq_len,
        "count_empty_sequences": config.loss.count_empty_sequences,
        "micro_batch_size": config.batch.micro_batch_size,
        "max_tokens_per_microbatch": config.batch.max_tokens_per_microbatch,
        "sequence_parallel": config.parallel.sequence_parallel,
        "virtual_pipeline_model_parallel_size": (
            config.parallel.virtual_pipeline_model_parallel_size
        ),
    }
