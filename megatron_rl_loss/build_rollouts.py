"""From a config to where the rollouts come from: a file, a stream, an engine, or a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config.schema import Config
from .config.validate import rollouts_per_step
from .lora import merged
from .mcore.model_spec import ModelSpec
from .mcore.weights import export_hf_weights, save_hf_checkpoint
from .recipe import row_checks
from .rollout_source import FileRollouts, RolloutSource, SampledRollouts, StreamedRollouts
from .rollouts.files import RolloutFiles
from .rollouts.hf_model import BaseModel
from .rollouts.inbox import Inbox
from .rollouts.prompts import PromptFile, PromptSource
from .rollouts.rewards import ReasoningGymTask, RewardFn, load_reward_fn
from .rollouts.sampler import Sampler
from .rollouts.stream import RolloutStream
from .watch_source import JOURNAL_FILE, WatchedRollouts, WeightExport

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_source(
    config: Config, spec: ModelSpec, chunks: Sequence[Any], base: BaseModel
) -> RolloutSource:
    """Returns the source that `rollouts.source` names.

    Args:
        config: of the run.
        spec: of the model.
        chunks: the model that is trained; a sampler, and an engine that is watched, get its
            weights.
        base: what the run starts from; its `hf_model` samples, and is changed to `sampler.dtype`.
    """
    if config.rollouts.source in ("files", "stream"):
        return build_file_source(config, spec)
    if config.rollouts.source == "watch":
        return build_watch_source(config, spec, chunks, base.hf_config)
    return build_sampled_source(config, spec, chunks, base)


def build_sampled_source(
    config: Config, spec: ModelSpec, chunks: Sequence[Any], base: BaseModel
) -> SampledRollouts:
    prompts, reward_fn = build_task(config)
    sampler = Sampler(
        base.hf_model.to(DTYPES[config.sampler.dtype]),
        base.tokenizer,
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
        export_weights=partial(export_hf_weights, exported_chunks(config, chunks), spec),
    )


def build_file_source(config: Config, spec: ModelSpec) -> FileRollouts | StreamedRollouts:
    shuffle_seed = config.run.seed if config.rollouts.shuffle else None
    per_step, whole_groups = rollouts_per_step(config), _compares_in_groups(config)
    if config.rollouts.source == "stream":
        stream = RolloutStream(
            config.rollouts.path,
            shuffle_seed=shuffle_seed,
            vocab_size=spec.vocab_size,
            **row_checks(config),
        )
        return StreamedRollouts(stream, per_step=per_step, whole_groups=whole_groups)
    return FileRollouts(
        RolloutFiles(config.rollouts.path, vocab_size=spec.vocab_size, **row_checks(config)),
        per_step=per_step,
        shuffle_seed=shuffle_seed,
        whole_groups=whole_groups,
    )


def build_watch_source(
    config: Config, spec: ModelSpec, chunks: Sequence[Any], hf_config: Any
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
            vocab_size=spec.vocab_size,
            **row_checks(config),
        )
    if settings.export_dir is not None:
        export = WeightExport(
            settings.export_dir,
            interval=settings.export_interval,
            save=partial(
                save_hf_checkpoint,
                chunks=exported_chunks(config, chunks),
                spec=spec,
                hf_config=hf_config,
                overwrite=True,
            ),
        )
    return WatchedRollouts(inbox, per_step=rollouts_per_step(config), export=export)


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


def exported_chunks(config: Config, chunks: Sequence[Any]) -> Sequence[Any]:
    """Returns what `export_hf_weights` reads: with LoRA, views with the adapters merged in."""
    if config.lora.rank is None:
        return chunks
    return merged(chunks)
