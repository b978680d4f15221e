"""The settings of a run, section by section. Values here are the defaults.

Settings are checked by `validate.check_config`; choices are listed there. Only `build.py` reads
these objects: everything below it takes keyword arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunConfig:
    """The run.

    Attributes:
        dir: folder for logs, plot and the config that was used.
        seed: of prompts, sampling, shuffling and the model's random state.
        steps: sample (or read), then train, so many times.
        log_interval: steps between two log entries.
        export: after the last step write the model to DIR/export, a Hugging Face checkpoint; with
            LoRA its adapters, a PEFT folder.
        hang_timeout: seconds without progress (a step's sampling, or its training) after which
            a rank prints its stacks and ends the job; null: never.
    """

    dir: str = "runs/latest"
    seed: int = 1234
    steps: int = 10
    log_interval: int = 1
    export: bool = False
    hang_timeout: float | None = 3600.0


@dataclass
class ModelConfig:
    """The model.

    Attributes:
        path: folder of a Hugging Face checkpoint, or "smollm2-demo".
        dtype: of the forward and backward pass, "fp32" or "bf16" (with fp32 master weights).
        recompute: of activations in backward, to save memory: "none", "selective" (the core
            attention) or "full" (each layer).
        moe_aux_loss_coef: of the experts' load-balancing loss; 0: none. It is Megatron's, a mean of
            micro-batch values that counts padding: it depends on the cut.
    """

    path: str = "smollm2-demo"
    dtype: str = "fp32"
    recompute: str = "none"
    moe_aux_loss_coef: float = 0.0


@dataclass
class LoRAConfig:
    """Low-rank adapters, trained in place of the model's weights; see docs/lora.md.

    With them the reference of the KL is the model without its adapters; no second copy is made.

    Attributes:
        rank: of the adapters; null: none, all weights are trained.
        alpha: the adapters' output is scaled by alpha / rank.
        targets: "attention", "all-linear", or a list of Megatron's layer names and patterns.
        expert_rank: rank of the experts' adapters; null: `rank`.
        exclude: layer names and patterns that get none.
        use_rslora: scale by alpha / sqrt(rank).
        seed: of the first values.
    """

    rank: int | None = None
    alpha: float = 32.0
    targets: Any = "attention"
    expert_rank: int | None = None
    exclude: list[str] = field(default_factory=list)
    use_rslora: bool = False
    seed: int = 0


@dataclass
class ParallelConfig:
    """Megatron's parallel sizes, by Megatron's names; the rest of the ranks is data parallel.

    An expert_tensor_parallel_size of null is the tensor-parallel size, as in Megatron.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False


@dataclass
class RolloutsConfig:
    """Where rollouts come from.

    Attributes:
        source: "sampler" (from the live model); "files", any row by its index; "stream", files that
            do not fit into memory (see `rollouts.stream` for the order); or "watch", files that
            an engine writes while the run goes on (see `rollouts.inbox`).
        path: not for the sampler: a file or folder.
        per_step: not for the sampler: rollouts in a step, over all ranks.
        shuffle: for files and stream: a new order in every pass, by run.seed; groups stay together.
        drop_non_finite: not for the sampler: do not train tokens whose log-probs are not finite,
            instead of stopping.
        max_staleness: for watch: files that are more steps old are not used.
        wait_timeout: for watch: seconds to wait for the rollouts of a step.
        done_markers: for watch: a file counts when NAME.done is beside it, where a rename is not
            atomic.
        export_dir: for watch: folder for the weights; null: the engine gets them in another way.
        export_interval: for watch: steps between two exports.
    """

    source: str = "sampler"
    path: str | None = None
    per_step: int | None = None
    shuffle: bool = True
    drop_non_finite: bool = False
    max_staleness: int = 4
    wait_timeout: float = 1800.0
    done_markers: bool = False
    export_dir: str | None = None
    export_interval: int = 1


@dataclass
class SamplerConfig:
    """The embedded sampler.

    Attributes:
        prompts_per_step: over all ranks.
        samples_per_prompt: responses to each.
        max_new_tokens: longest response.
        temperature: of sampling and, from the sampler or from files, of the trainer's log-probs.
        prompts_per_batch: prompts that are run together; ranks get whole batches.
        dtype: of the sampler's copy of the model, "fp32" or "bf16".
    """

    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    prompts_per_batch: int = 4
    dtype: str = "fp32"


@dataclass
class TaskConfig:
    """The prompts to sample from; give `name` or `path`.

    Attributes:
        name: of a `reasoning-gym` task.
        params: its parameters.
        size: of its data set; then the same prompts come again.
        path: JSON lines with `prompt` or `messages`.
        system_prompt: put before each prompt.
        suffix: put after each prompt.
    """

    name: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    size: int = 1000
    path: str | None = None
    system_prompt: str | None = None
    suffix: str = ""


@dataclass
class RewardConfig:
    """The reward of a response.

    Attributes:
        fn: "my_pkg.my_mod:reward_fn", a function of (prompt text, response text, example);
            null: the task's own reward, which the other settings are for.
        correct_score: a response that the task scores above it earns 1, others 0; null: it earns
            its score.
        format_pattern: regular expression; a response that matches it as a whole earns
            `format_reward` on top.
        format_reward: see there.
        kl_coef, kl_estimator: KL to the reference, taken from the reward of each token; only with
            advantage.estimator=gae.
        kl_target, kl_horizon: kl_coef follows the measured KL (nats per token, sequences), see
            `ops.coefficients.AdaptiveKLCoef`; null: it stays.
    """

    fn: str | None = None
    correct_score: float | None = 0.9
    format_pattern: str | None = None
    format_reward: float = 0.2
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    kl_target: float | None = None
    kl_horizon: float = 10_000.0


@dataclass
class AdvantageConfig:
    """Advantages from rewards.

    Attributes:
        estimator: a name in `ops.advantages.ADVANTAGE_ESTIMATORS`; "gae": from a critic, per
            token; or "none": rollout files carry advantages, or the loss reads none.
        normalize_by_std: for "grpo".
        k: for "pass_at_k".
    """

    estimator: str = "grpo"
    normalize_by_std: bool = True
    k: int | None = None


@dataclass
class CriticConfig:
    """The critic of advantage.estimator=gae: the policy's layers, with a value head.

    It has the policy's layout, dtype and optimizer settings but for the learning rate, and takes
    one optimizer step for each of the policy's. Values start at 0.

    Attributes:
        lr: learning rate after the warm-up.
        value_clip: see `losses.value.clipped_value_loss`; null: no clip.
        discount, gae_lambda: see `ops.gae.gae`.
        whiten_advantages: mean 0 and variance 1 over all trained tokens of a step.
        bootstrap: the last token's value follows a response that was cut short, instead of 0.
    """

    lr: float = 1e-5
    value_clip: float | None = 0.2
    discount: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = True
    bootstrap: bool = False


@dataclass
class LossConfig:
    """The loss; see `losses.objective.Objective`.

    Attributes:
        name: a name in `losses.registry.LOSSES`, or "my_pkg.my_mod:fn".
        settings: keyword arguments of that function. A config that sets `name` starts without
            the settings of the configs before it.
        reduction, max_seq_len, count_empty_sequences: token weights, see `ops.reduction`.
        kl_coef, kl_estimator, kl_is_weighted: KL to the reference.
        kl_target, kl_horizon: kl_coef follows the measured KL (nats per token, sequences), see
            `ops.coefficients.AdaptiveKLCoef`; null: it stays.
        entropy_coef, entropy_max: entropy bonus.
        entropy_target, entropy_step, entropy_coef_max: entropy_coef follows the measured entropy
            (nats), see `ops.coefficients.AdaptiveEntropyCoef`; null: it stays.
        off_policy: settings of `losses.off_policy.OffPolicy`; empty: no correction.
        lm_head: "logits", "fused" (log-probs without logits), "fused_forward" (the same with the
            gradients made in forward, for token-level losses) or "auto": logits while those of a
            micro-batch fit the budget, else fused; see `mcore.fused_head`.
        memory_budget_bytes: of the logits of a micro-batch on one rank; null: 2 GiB.
    """

    name: str = "ppo_clip"
    settings: dict[str, Any] = field(default_factory=dict)
    reduction: str = "token_mean"
    max_seq_len: int | None = None
    count_empty_sequences: bool = True
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_is_weighted: bool = False
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    entropy_coef: float = 0.0
    entropy_max: float | None = None
    entropy_target: float | None = None
    entropy_step: float = 0.005
    entropy_coef_max: float = 1.0
    off_policy: dict[str, Any] = field(default_factory=dict)
    lm_head: str = "auto"
    memory_budget_bytes: int | None = None


@dataclass
class BatchConfig:
    """How a step's rollouts are trained on.

    Attributes:
        micro_batch_size: most sequences in a micro-batch; null with the next.
        max_tokens_per_microbatch: most tokens in a micro-batch, padding included.
        mini_batches_per_step: optimizer steps per pass over a step's rollouts.
        epochs: passes over a step's rollouts.
    """

    micro_batch_size: int | None = 8
    max_tokens_per_microbatch: int | None = None
    mini_batches_per_step: int = 1
    epochs: int = 1


@dataclass
class OptimizerConfig:
    """Megatron's Adam.

    Attributes:
        lr: learning rate after the warm-up.
        betas, eps, weight_decay: as usual.
        clip_grad: largest global gradient norm; 0: no clipping.
        use_distributed_optimizer: shard its state over data-parallel ranks.
        warmup_steps: optimizer steps in which the learning rate rises to `lr`.
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False
    warmup_steps: int = 0


@dataclass
class CheckpointConfig:
    """Checkpoints to resume from.

    Attributes:
        dir: folder that all ranks share; null: run.dir/checkpoints.
        interval: steps between two checkpoints; also at the last step, and before a stop that a
            signal asks for; null: none.
        keep_last: so many are kept.
        asynchronous: write beside training, from a copy in host memory.
        resume: "auto": from the newest whole checkpoint in `dir`, if there is one; "never": refuse
            a `dir` that has checkpoints; or a path, of a checkpoint or a folder of them.
    """

    dir: str | None = None
    interval: int | None = None
    keep_last: int = 2
    asynchronous: bool = True
    resume: str = "auto"


@dataclass
class LoggingConfig:
    """What global rank 0 writes.

    Attributes:
        jsonl: metrics.jsonl in run.dir.
        tensorboard: event files in run.dir.
        wandb, wandb_project, wandb_mode: Weights & Biases; mode "offline" needs no network.
        progress: a bar, or in log files a line per step.
        plot: a PNG of the curves at the end.
    """

    jsonl: bool = True
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "megatron-rl-loss"
    wandb_mode: str = "offline"
    progress: bool = True
    plot: bool = True


@dataclass
class Config:
    """All sections."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
