"""Trains on the rollouts of a step: advantages, mini-batches, optimizer steps, metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .errors import ConfigError
from .mcore.forward_step import ForwardStep
from .mcore.groups import ParallelGroups
from .mcore.mini_batch import cut_mini_batch
from .mcore.token_log_probs import token_log_probs
from .mcore.train_step import train_step
from .ppo import PPO, AdaptiveCoefs, Cut
from .rollouts.rollout import Rollout
from .rollouts.sequences import (
    AdvantageEstimator,
    group_numbers,
    rollout_advantages,
    rollout_metrics,
    training_sequence,
)
from .types import MicroBatch

# of several mini-batches in a step, the last one's
LAST_VALUE = ("learning_rate", "critic_learning_rate")
LARGEST = ("_max",)


@dataclass
class Trainer:
    """The model with its optimizer, and how a step's rollouts become optimizer steps.

    Attributes:
        chunks, optimizer, scheduler: Megatron's.
        forward_step: with `on_policy` where every rollout is used for one optimizer step only.
        groups: this rank's.
        estimator: makes advantages from rewards; None: the rollouts carry advantages, or `ppo`
            makes them.
        cutting: keyword arguments of `cut_mini_batch`.
        num_mini_batches: optimizer steps per pass over a step's rollouts.
        num_epochs: passes.
        reference: model for `ref_log_probs`, where the rollouts carry none: a frozen one, or the
            trained one with `reference_mode`.
        reference_mode: makes the block in which the reference runs; with LoRA the adapters are
            disabled in it.
        ppo: a critic and what belongs to it.
        coefs: coefficients that change after each step.
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    forward_step: ForwardStep
    groups: ParallelGroups
    estimator: AdvantageEstimator | None
    cutting: Mapping[str, Any] = field(default_factory=dict)
    num_mini_batches: int = 1
    num_epochs: int = 1
    reference: Sequence[Any] | None = None
    reference_mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ppo: PPO | None = None
    coefs: AdaptiveCoefs = field(default_factory=AdaptiveCoefs)

    def train_on(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Trains on all rollouts of a step and returns the metrics, the same on every rank.

        Over several mini-batches and epochs, metrics are averaged, `_max` ones are the largest.

        Args:
            rollouts: of all ranks, in the same order on each.

        Raises:
            InputError, ConfigError: something is wrong with the rollouts; nothing was trained.
        """
        sequences = self._sequences(rollouts)
        cuts: list[Cut] = [
            cut_mini_batch(part, self.groups, **self.cutting) for part in self._parts(sequences)
        ]
        mini_batches = [micro_batches for micro_batches, _ in cuts]
        for micro_batches in mini_batches:
            self._add_log_probs(micro_batches)
        made = {}
        if self.ppo is not None:
            made = self.ppo.prepare(cuts, self._parts(list(rollouts)), self.groups)
        results = [
            self._update(micro_batches)
            for _ in range(self.num_epochs)
            for micro_batches in mini_batches
        ]
        metrics = mean_metrics(results) | rollout_metrics(rollouts) | made
        return metrics | self.coefs.update(self.forward_step, metrics, len(rollouts))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run must know beside models and optimizers."""
        return self.coefs.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, in a run with the same settings."""
        self.coefs.load_state(state, self.forward_step)

    def _update(self, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """One optimizer step of the policy and, with a critic, one of the critic."""
        metrics = train_step(
            self.forward_step,
            self.chunks,
            self.optimizer,
            micro_batches,
            scheduler=self.scheduler,
        )
        return metrics if self.ppo is None else metrics | self.ppo.critic.train(micro_batches)

    def _sequences(self, rollouts: Sequence[Rollout]) -> list[dict[str, Tensor]]:
        numbers = group_numbers(rollouts)
        advantages = self._advantages(rollouts, numbers)
        return [
            training_sequence(rollout, advantage, number)
            for rollout, advantage, number in zip(rollouts, advantages, numbers, strict=True)
        ]

    def _advantages(self, rollouts: Sequence[Rollout], numbers: Sequence[int]) -> Sequence[Any]:
        not_read = self.ppo or "advantages" not in self.forward_step.objective.needs
        if self.estimator is None and not_read:
            return [0.0] * len(rollouts)
        return rollout_advantages(rollouts, numbers, self.estimator)

    def _parts(self, sequences: list[Any]) -> list[list[Any]]:
        num = self.num_mini_batches
        if len(sequences) % num:
            raise ConfigError(
                f"{len(sequences)} rollouts do not split into {num} mini-batches of one size; "
                "change batch.mini_batches_per_step or the number of rollouts."
            )
        size = len(sequences) // num
        return [sequences[i * size : (i + 1) * size] for i in range(num)]

    def _add_log_probs(self, micro_batches: list[MicroBatch]) -> None:
        """Adds the `old_log_probs` and `ref_log_probs` that are read and that are missing."""
        needs = self.forward_step.objective.needs + (() if self.ppo is None else self.ppo.needs)
        models = {"old_log_probs": self.chunks, "ref_log_probs": self.reference}
        for name, model in models.items():
            if name not in needs or name in micro_batches[0]:
                continue
            if model is None:
                raise ConfigError(
                    f"the loss (or the KL in the rewards) reads {name!r}, but the rollouts carry "
                    "none and there is no reference model."
                )
            mode = self.reference_mode if name == "ref_log_probs" else contextlib.nullcontext
            with mode():
                values = token_log_probs(model, micro_batches, **vars(self.forward_step.head))
            for micro_batch, value in zip(micro_batches, values, strict=True):
                micro_batch[name] = value


def mean_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns metrics over several optimizer steps: means, and the largest of `_max` ones.

    >>> mean_metrics([{"loss": 1.0, "ratio_max": 2.0}, {"loss": 3.0, "ratio_max": 1.0}])
    {'loss': 2.0, 'ratio_max': 2.0}
    """
    metrics = {}
    for name in results[0]:
        values = [result[name] for result in results]
        if name in LAST_VALUE:
            metrics[name] = values[-1]
        else:
            metrics[name] = max(values) if name.endswith(LARGEST) else sum(values) / len(values)
    return metrics
