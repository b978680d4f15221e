"""Our rollout files and losses for scripts that call Megatron's `pretrain()`; docs/pretrain.md.

Megatron's sampler hands out samples in the order of their numbers, so sample i belongs to global
batch i // global_batch_size whatever the layout is. The data set therefore makes the token weights
and the group-relative advantages of a whole global batch before any of its samples goes out.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from .config.load import load_config
from .config.schema import Config
from .errors import ConfigError, InputError
from .lora import apply_lora
from .mcore.forward_step import ForwardStep, make_forward_step
from .mcore.micro_batches import with_loss_weights
from .mcore.model_spec import ModelSpec, model_spec_from_hf
from .mcore.pretrain import norm_epsilon
from .mcore.weights import load_hf_weights
from .parallel.packing import pad_sequences
from .recipe import build_estimator, lora_settings, reads_advantages, row_checks, step_settings
from .report import METRICS_FILE
from .rollouts.files import RolloutFiles
from .rollouts.sequences import (
    AdvantageEstimator,
    group_numbers,
    rollout_advantages,
    training_sequence,
)

OLD_LOG_PROBS = ("current", "rollout")
# Global batches that a data loader may be in at once: the running one and one that is prefetched.
_KEPT_BATCHES = 2


def add_arguments(parser: Any) -> Any:
    """Adds the `--mrl-*` arguments; an `extra_args_provider` for Megatron.

    It also makes "no evaluation" the default.
    """
    group = parser.add_argument_group(title="megatron-rl-loss")
    group.add_argument("--mrl-rollouts", required=True, help="a rollout file, or a folder of them")
    group.add_argument(
        "--mrl-config",
        nargs="+",
        default=[],
        metavar="FILE.yaml|KEY=VALUE",
        help="settings of the main job's sections loss, advantage, lora, rollouts and sampler."
        "temperature; what Megatron has an argument for comes from Megatron's",
    )
    group.add_argument(
        "--mrl-hf-weights",
        help="a Hugging Face checkpoint folder to start from, where Megatron loads no checkpoint; "
        "Megatron's arguments must describe the same model",
    )
    group.add_argument(
        "--mrl-run-dir",
        help="the last rank writes metrics.jsonl here, for `megatron-rl-loss plot`",
    )
    group.add_argument(
        "--mrl-old-log-probs",
        choices=OLD_LOG_PROBS,
        default="current",
        help="what the loss compares with: the current weights (each rollout is trained once, soon "
        "after it was sampled), or the log-probs that the rollout engine wrote",
    )
    parser.set_defaults(eval_iters=0, eval_interval=1000)
    return parser


def read_config(args: Any) -> Config:
    """Returns the settings that the `--mrl-*` arguments name, checked together with Megatron's.

    Raises:
        ConfigError: a setting is wrong, or an argument of Megatron's does not suit.
    """
    config = load_config(
        None,
        [
            *args.mrl_config,
            "rollouts.source=files",
            f"rollouts.path={args.mrl_rollouts}",
            f"rollouts.per_step={args.global_batch_size}",
            f"run.seed={args.seed}",
        ],
    )
    if config.advantage.estimator == "gae":
        raise ConfigError(
            "advantage.estimator=gae needs a critic, which pretrain() cannot train beside the "
            "policy; use the main job, or another estimator."
        )
    for name in ("kl_target", "entropy_target"):
        if getattr(config.loss, name) is not None:
            raise ConfigError(
                f"loss.{name}: pretrain() has no place after a step where a coefficient could "
                "change; use the main job, or a fixed coefficient."
            )
    check_arguments(args)
    return config


def check_arguments(args: Any) -> None:
    """Raises `ConfigError` if Megatron's arguments would break the order or size of batches."""
    size = args.global_batch_size
    consumed = getattr(args, "consumed_train_samples", 0)
    wrong = [
        (
            args.dataloader_type != "single",
            f"--dataloader-type {args.dataloader_type}: must be single; rollouts are shuffled "
            "between passes by rollouts.shuffle",
        ),
        (
            bool(getattr(args, "rampup_batch_size", None)),
            "--rampup-batch-size: token weights are made for one --global-batch-size",
        ),
        (bool(args.eval_iters), f"--eval-iters {args.eval_iters}: must be 0, there is no eval set"),
        (
            consumed % size != 0,
            f"{consumed} samples are consumed, which is no multiple of --global-batch-size {size}: "
            "resume with the batch size that the checkpoint was made with",
        ),
        (
            bool(getattr(args, "perform_rl_step", False)),
            "--perform-rl-step: is Megatron's own RL loop; leave it out",
        ),
    ]
    problems = [text for is_wrong, text in wrong if is_wrong]
    if problems:
        raise ConfigError("\n".join(problems))


def make_pretrain_step(args: Any) -> ForwardStep:
    """Returns the forward step for `pretrain()`: metrics are [sum, count] pairs.

    Raises:
        ConfigError: a setting is wrong.
    """
    return make_forward_step(
        **step_settings(read_config(args)),
        on_policy=args.mrl_old_log_probs == "current",
        vocab_size=args.vocab_size,
        pairs_only=True,
    )


def make_datasets(args: Any, num_samples: Sequence[int]) -> tuple[RolloutDataset, None, None]:
    """Returns the train set (no valid and test set), for a datasets provider.

    Args:
        args: Megatron's, with ours.
        num_samples: of [train, valid, test].
    """
    config = read_config(args)
    files = RolloutFiles(
        config.rollouts.path,
        vocab_size=args.vocab_size,
        max_tokens=args.seq_length,
        **row_checks(config),
    )
    dataset = RolloutDataset(
        files,
        num_samples=num_samples[0],
        global_batch_size=args.global_batch_size,
        seq_length=args.seq_length,
        estimator=build_estimator(config),
        shuffle_seed=config.run.seed if config.rollouts.shuffle else None,
        reduction=config.loss.reduction,
        max_seq_len=config.loss.max_seq_len,
        count_empty_sequences=config.loss.count_empty_sequences,
        rollout_is_old=args.mrl_old_log_probs == "rollout",
        reads_advantages=reads_advantages(config),
    )
    return dataset, None, None


def write_metrics(args: Any, iteration: int, metrics: Mapping[str, float]) -> None:
    """Adds a line to metrics.jsonl in `--mrl-run-dir`, if that is given."""
    if args.mrl_run_dir is None:
        return
    path = Path(args.mrl_run_dir) / METRICS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": iteration, **metrics}) + "\n")


def start_model(args: Any, model: Any) -> Any:
    """Returns a model provider's model with `--mrl-hf-weights`, and adapters if `lora.rank` is set.

    Raises:
        ConfigError, WeightsError: Megatron's arguments describe another model.
    """
    if args.mrl_hf_weights is not None:
        folder = Path(args.mrl_hf_weights)
        spec = model_spec_from_hf(json.loads((folder / "config.json").read_text()))
        _check_model_arguments(args, spec)
        load_hf_weights([model], folder, spec)
    lora = lora_settings(read_config(args))
    if lora is not None:
        apply_lora([model], lora)
    return model


def _check_model_arguments(args: Any, spec: ModelSpec) -> None:
    """Checks what shapes do not show."""
    pairs = {
        "--rotary-base": (args.rotary_base, spec.rope_theta),
        "--norm-epsilon": (norm_epsilon(args), spec.rms_norm_eps),
        "--swiglu": (args.swiglu, True),
        "--normalization": (args.normalization, "RMSNorm"),
        "--position-embedding-type": (args.position_embedding_type, "rope"),
        "--rotary-percent": (args.rotary_percent, 1.0),
        "--use-rope-scaling": (args.use_rope_scaling, spec.rope_scaling is not None),
    }
    wrong = [
        f"{name} is {ours!r}, the checkpoint has {theirs!r}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if wrong:
        raise ConfigError(f"{args.mrl_hf_weights} is another model: {'; '.join(wrong)}.")


class RolloutDataset(Dataset):
    """Rollouts as samples of one length, each with its weight in its global batch.

    Sample i is trained in global batch i // global_batch_size. Passes over the files follow each
    other without a gap; after a restart Megatron's sampler goes on at its count of consumed
    samples, so that every rollout is trained equally often.

    Args:
        files: opened and checked.
        num_samples: of the whole run.
        global_batch_size: Megatron's: samples of an optimizer step, over all ranks.
        seq_length: samples are padded to it on the right.
        estimator: makes advantages from the rewards of a global batch; None: the files have them.
        shuffle_seed: of each pass; None: the files' order.
        reduction, max_seq_len, count_empty_sequences: token weights, see `token_weights`.
        rollout_is_old: `old_log_probs` are the files' `rollout_log_probs`.
        reads_advantages: False: the loss reads none, and the files need not have any.

    Raises:
        InputError: fewer samples than a global batch.
    """

    def __init__(
        self,
        files: RolloutFiles,
        *,
        num_samples: int,
        global_batch_size: int,
        seq_length: int,
        estimator: AdvantageEstimator | None,
        shuffle_seed: int | None,
        reduction: str,
        max_seq_len: int | None = None,
        count_empty_sequences: bool = True,
        rollout_is_old: bool = False,
        reads_advantages: bool = True,
    ) -> None:
        if len(files) < global_batch_size:
            raise InputError(
                f"there are {len(files)} rollouts, fewer than --global-batch-size "
                f"{global_batch_size}; write more, or choose a smaller size."
            )
        self._files = files
        self._num_samples = num_samples
        self._size = global_batch_size
        self._seq_length = seq_length
        self._estimator = estimator
        self._shuffle_seed = shuffle_seed
        self._rollout_is_old = rollout_is_old
        self._reads_advantages = reads_advantages
        self._weighting: dict[str, Any] = {
            "reduction": reduction,
            "max_seq_len": max_seq_len,
            "count_empty_sequences": count_empty_sequences,
        }
        self._batches: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = divmod(int(index), self._size)
        if number not in self._batches:
            self._batches[number] = self.global_batch(number)
        while len(self._batches) > _KEPT_BATCHES:
            self._batches.popitem(last=False)
        return {name: values[row] for name, values in self._batches[number].items()}

    def global_batch(self, number: int) -> Mapping[str, Tensor]:
        """Returns global batch `number`: [global_batch_size, seq_length] tensors, with weights.

        Raises:
            RolloutError: a rollout is bad, or a group is cut.
        """
        rollouts = self._files.mini_batch(
            number,
            self._size,
            shuffle_seed=self._shuffle_seed,
            whole_groups=self._estimator is not None,
        )
        numbers = group_numbers(rollouts)
        advantages: Sequence[Any] = [0.0] * len(rollouts)
        if self._reads_advantages:
            advantages = rollout_advantages(rollouts, numbers, self._estimator)
        rows = [training_sequence(*row) for row in zip(rollouts, advantages, numbers, strict=True)]
        batch = pad_sequences(rows, width=self._seq_length)
        if self._rollout_is_old:
            _check_rollout_log_probs(batch)
            batch["old_log_probs"] = batch["rollout_log_probs"]
        return with_loss_weights([batch], **self._weighting)[0]


def _check_rollout_log_probs(batch: Mapping[str, Tensor]) -> None:
    if "rollout_log_probs" not in batch:
        raise ConfigError(
            "--mrl-old-log-probs rollout, but the rollouts have no 'rollout_log_probs'."
        )
