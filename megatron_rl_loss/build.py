"""From a config to the objects of the main job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .build_rollouts import build_source, build_task
from .config.schema import Config
from .config.validate import FROM_FILES
from .errors import InputError
from .lora import apply_lora, disabled, save_peft
from .mcore.checkpoint import Checkpointer
from .mcore.checkpoint_state import Trained
from .mcore.forward_step import ForwardStep, make_forward_step
from .mcore.groups import parallel_groups
from .mcore.model import build_gpt_model, padded_vocab_size, transformer_config
from .mcore.model_spec import ModelSpec, model_spec_from_hf
from .mcore.optimizer import build_optimizer, build_scheduler, wrap_with_ddp
from .mcore.ranks import start_ranks
from .mcore.value_model import value_spec, value_weights
from .mcore.weights import load_hf_weights, save_hf_checkpoint
from .ppo import PPO, AdaptiveCoefs, make_coefs, make_ppo
from .recipe import build_estimator, lora_settings, parallel_sizes, step_settings
from .rollout_source import RolloutSource
from .rollouts.hf_model import BaseModel, read_base_model, read_hf_config
from .trainer import Trainer

EXPORT_FOLDER = "export"


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
    start_ranks(**parallel_sizes(config), seed=config.run.seed)
    base = base_model(config, samples=config.rollouts.source == "sampler")
    spec = model_spec_from_hf(base.hf_config)
    trainer = build_trainer(config, spec, base.weights)
    source = build_source(config, spec, trainer.chunks, base)
    checkpoints = build_checkpointer(config, spec, trainer, source)
    return Job(trainer, source, spec, base.hf_config, checkpoints)


def base_model(config: Config, *, samples: bool = False) -> BaseModel:
    """Returns what training starts from: in memory where it samples, or a critic is made of it."""
    has_critic = config.advantage.estimator == "gae"
    return read_base_model(config.model.path, in_memory=samples or has_critic)


def export_trained(config: Config, job: Job) -> Path:
    """Writes the trained model, or its adapters, to the run's folder, and returns where.

    Communicates: every rank must call it.
    """
    folder, chunks = Path(config.run.dir) / EXPORT_FOLDER, job.trainer.chunks
    if config.lora.rank is None:
        save_hf_checkpoint(folder, chunks, job.spec, job.hf_config, overwrite=True)
    else:
        save_peft(folder, chunks, job.spec, base_model=config.model.path, overwrite=True)
    return folder


def check_inputs(config: Config) -> None:
    """Raises if a file, task or reward function is not there, or the layout cannot hold the model.

    Loads no weights.

    Raises:
        InputError, ConfigError: naming what is missing.
        LayoutError: a parallel size does not divide the model.
    """
    _megatron_config(config, model_spec_from_hf(read_hf_config(config.model.path)))
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
    return make_forward_step(
        **step_settings(config),
        on_policy=updates_per_step(config) == 1 and not config.loss.off_policy,
        vocab_size=spec.vocab_size,
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
        about={"layout": parallel_sizes(config)},
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


def _model_chunks(config: Config, spec: ModelSpec, weights: Any) -> Sequence[Any]:
    megatron_config = _megatron_config(config, spec)
    rows = padded_vocab_size(spec.vocab_size, config.parallel.tensor_model_parallel_size)
    chunks = build_gpt_model(spec, megatron_config, padded_vocab_size=rows)
    load_hf_weights(chunks, weights, spec)
    return chunks


def _megatron_config(config: Config, spec: ModelSpec) -> Any:
    return transformer_config(
        spec,
        bf16=config.model.dtype == "bf16",
        sequence_parallel=config.parallel.sequence_parallel,
        moe_aux_loss_coef=config.model.moe_aux_loss_coef,
        recompute=None if config.model.recompute == "none" else config.model.recompute,
        # The weights are loaded right after. perform_initialization=False would be quicker to
        # say, but then Megatron does not mark sharded weights, and counts them once in the norm.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        **parallel_sizes(config),
    )


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
