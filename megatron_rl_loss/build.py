"""From a config to objects: the only place below the main job that reads the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config.schema import Config
from .config.validate import FROM_FILES, rollouts_per_step
from .errors import InputError
from .lora import apply_lora, disabled, merged
from .mcore.checkpoint import Checkpointer
from .mcore.checkpoint_state import Trained
from .mcore.forward_step import ForwardStep, make_forward_step
from .mcore.groups import parallel_groups
from .mcore.model import build_gpt_model, padded_vocab_size, transformer_config
from .mcore.model_spec import ModelSpec, model_spec_from_hf
from .mcore.optimizer import build_optimizer, build_scheduler, wrap_with_ddp
from .mcore.ranks import start_ranks
from .mcore.value_model import value_spec, value_weights
from .mcore.weights import export_hf_weights, load_hf_weights, save_hf_checkpoint
from .ppo import PPO, AdaptiveCoefs, make_coefs, make_ppo
from .recipe import build_estimator, lora_settings
from .rollout_source import FileRollouts, RolloutSource, SampledRollouts, StreamedRollouts
from .rollouts.files import RolloutFiles
from .rollouts.hf_model import check_hf_model, load_hf_model
from .rollouts.inbox import Inbox
from .rollouts.prompts import PromptFile, PromptSource
from .rollouts.rewards import ReasoningGymTask, RewardFn, load_reward_fn
from .rollouts.sampler import Sampler
from .rollouts.stream import RolloutStream
from .trainer import Trainer
from .watch_source import JOURNAL_FILE, WatchedRollouts, WeightExport

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
    checkpoints = build_checkpointer(config, spec, trainer, source)
    return Job(trainer, source, spec, hf_model.config, checkpoints)


def check_inputs(config: Config) -> None:
    """Raises if a file, task or reward function of the config is not there; loads no model.

    Raises:
        InputError, ConfigError: naming what is missing.
    """
    check_hf_model(config.model.path)
    lora_settings(config)
    if config.rollouts.source == "sampler":
        build_task(config)
    elif config.rollouts.source != "watch" and not Path(config.rollouts.path).exists():
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
    optimizer, scheduler = _optimizer(config, chunks, config.optimizer.lr)
    forward_step = build_forward_step(config, spec)
    ppo = build_ppo(config, spec, weights)
    return Trainer(
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step=forward_step,
        groups=parallel_groups(),
        estimator=build_estimator(config),
        cutting=_cutting(config),
        num_mini_batches=config.batch.mini_batches_per_step,
        num_epochs=config.batch.epochs,
        ppo=ppo,
        coefs=build_coefs(config, ppo),
        **_reference(config, spec, weights, chunks, forward_step),
    )


def _optimizer(config: Config, chunks: Sequence[Any], lr: float) -> tuple[Any, Any]:
    """Returns Megatron's optimizer and its scheduler."""
    settings = config.optimizer
    optimizer = build_optimizer(
        chunks,
        lr=lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
    )
    scheduler = build_scheduler(
        optimizer,
        lr=lr,
        warmup_steps=settings.warmup_steps,
        total_steps=config.run.steps * updates_per_step(config),
    )
    return optimizer, scheduler


def build_ppo(config: Config, spec: ModelSpec, weights: Any) -> PPO | None:
    """Returns the critic and its settings, None without advantage.estimator=gae."""
    if config.advantage.estimator != "gae":
        return None
    chunks = wrap_with_ddp(
        _model_chunks(config, value_spec(spec), value_weights(weights, spec)),
        use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
    )
    settings = dict(vars(config.critic))
    trained = (chunks, *_optimizer(config, chunks, settings.pop("lr")))
    kl = {name: value for name, value in vars(config.reward).items() if name.startswith("kl_")}
    return make_ppo(*trained, **settings, **kl)


def build_coefs(config: Config, ppo: PPO | None) -> AdaptiveCoefs:
    """Returns the coefficients that follow a measured quantity."""
    names = ("kl_coef", "kl_target", "kl_horizon")
    names += ("entropy_coef", "entropy_target", "entropy_step", "entropy_coef_max")
    settings = {name: getattr(config.loss, name) for name in names}
    return make_coefs(None if ppo is None else ppo.reward_kl, **settings)


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


def build_checkpointer(
    config: Config, spec: ModelSpec, trainer: Trainer, source: RolloutSource
) -> Checkpointer | None:
    """Returns what saves and resumes the run, None without `checkpoint.interval`."""
    checkpoint = config.checkpoint
    if checkpoint.interval is None:
        return None
    return Checkpointer(
        checkpoint.dir or Path(config.run.dir) / "checkpoints",
        _trained(trainer, source),
        interval=checkpoint.interval,
        keep_last=checkpoint.keep_last,
        asynchronous=checkpoint.asynchronous,
        identity={"model": asdict(spec), "order of the data": _data_order(config)},
        about={"layout": _parallel_sizes(config)},
    )


class _TrainerAndSource:
    """What a checkpoint keeps beside the models: coefficients, and the position in the data."""

    def __init__(self, trainer: Trainer, source: RolloutSource) -> None:
        self._trainer, self._source = trainer, source

    def state_dict(self) -> dict[str, Any]:
        return {**self._trainer.state_dict(), "rollouts": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.load_state_dict({k: v for k, v in state.items() if k != "rollouts"})
        self._source.load_state_dict(state.get("rollouts", {}))


def _trained(trainer: Trainer, source: RolloutSource) -> dict[str, Trained]:
    extra = _TrainerAndSource(trainer, source)
    policy = Trained(trainer.chunks, trainer.optimizer, trainer.scheduler, extra=extra)
    models = {"policy": policy}
    if trainer.ppo is not None:
        critic = trainer.ppo.critic
        models["critic"] = Trained(critic.chunks, critic.optimizer, critic.scheduler, "critic.")
    return models


def _data_order(config: Config) -> dict[str, Any]:
    """Returns the settings that, with the number of steps done, say which data comes next."""
    order = {"run.seed": config.run.seed, "rollouts.source": config.rollouts.source}
    if config.rollouts.source in FROM_FILES:
        return order | {
            "rollouts.per_step": config.rollouts.per_step,
            "rollouts.shuffle": config.rollouts.shuffle,
        }
    return order | {"sampler.prompts_per_step": config.sampler.prompts_per_step}


def build_source(
    config: Config, spec: ModelSpec, trainer: Trainer, hf_model: Any, tokenizer: Any
) -> RolloutSource:
    export_weights = partial(export_hf_weights, exported_chunks(config, trainer.chunks), spec)
    if config.rollouts.source in ("files", "stream"):
        return build_file_source(config, spec)
    if config.rollouts.source == "watch":
        return build_watch_source(config, spec, trainer, hf_model.config)
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
        export_weights=export_weights,
    )


def build_file_source(config: Config, spec: ModelSpec) -> FileRollouts | StreamedRollouts:
    shuffle_seed = config.run.seed if config.rollouts.shuffle else None
    per_step, whole_groups = rollouts_per_step(config), _compares_in_groups(config)
    if config.rollouts.source == "stream":
        stream = RolloutStream(
            config.rollouts.path, shuffle_seed=shuffle_seed, **_row_checks(config, spec)
        )
        return StreamedRollouts(stream, per_step=per_step, whole_groups=whole_groups)
    return FileRollouts(
        RolloutFiles(config.rollouts.path, **_row_checks(config, spec)),
        per_step=per_step,
        shuffle_seed=shuffle_seed,
        whole_groups=whole_groups,
    )


def build_watch_source(
    config: Config, spec: ModelSpec, trainer: Trainer, hf_config: Any
) -> WatchedRollouts:
    """Returns the source that takes files from an engine, and exports weights for it."""
    settings, inbox, export = config.rollouts, None, None
    if dist.get_rank() == 0:
        inbox = Inbox(
            settings.path,
            Path(config.run.dir) / JOURNAL_FILE,
            max_staleness=settings.max_staleness,
            timeout=settings.wait_timeout,
            done_markers=settings.done_markers,
            whole_groups=_compares_in_groups(config),
            **_row_checks(config, spec),
        )
    if settings.export_dir is not None:
        export = WeightExport(
            settings.export_dir,
            interval=settings.export_interval,
            save=partial(
                save_hf_checkpoint,
                chunks=exported_chunks(config, trainer.chunks),
                spec=spec,
                hf_config=hf_config,
                overwrite=True,
            ),
        )
    return WatchedRollouts(inbox, per_step=rollouts_per_step(config), export=export)


def _row_checks(config: Config, spec: ModelSpec) -> dict[str, Any]:
    drop_non_finite = config.rollouts.drop_non_finite
    return {"vocab_size": spec.vocab_size, "drop_non_finite": drop_non_finite}


def _compares_in_groups(config: Config) -> bool:
    return config.advantage.estimator not in ("gae", "none")


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
        moe_aux_loss_coef=config.model.moe_aux_loss_coef,
        recompute=None if config.model.recompute == "none" else config.model.recompute,
        # The weights are loaded right after. perform_initialization=False would be quicker to
        # say, but then Megatron does not mark sharded weights, and counts them once in the norm.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        **_parallel_sizes(config),
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
    copy of the initial model, frozen; nothing if neither loss nor rewards ask."""
    if "ref_log_probs" not in forward_step.objective.needs and not config.reward.kl_coef:
        return {}
    if config.lora.rank is not None:
        return {"reference": chunks, "reference_mode": partial(disabled, chunks)}
    copy = _model_chunks(config, spec, weights)
    for chunk in copy:
        chunk.requires_grad_(False)
    return {"reference": copy}


def exported_chunks(config: Config, chunks: Sequence[Any]) -> Sequence[Any]:
    """Returns what `export_hf_weights` reads: with LoRA, views with the adapters merged in."""
    if config.lora.rank is None:
        return chunks
    return merged(chunks)


def _parallel_sizes(config: Config) -> dict[str, Any]:
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    return {name: getattr(config.parallel, name) for name in names}


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
