"""PPO's critic in a step: values, advantages and returns before training, then its own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..metrics import mean_pair, reduce_metrics
from ..ops.gae import gae
from ..ops.kl import kl_penalty, kl_shaped_rewards
from ..parallel.whitening import whiten
from ..types import MicroBatch
from .groups import ParallelGroups
from .train_step import train_step
from .value_step import ValueStep, token_values

# made into the explained variance when they are reduced
_PARTS = ("return_sq_mean", "value_error_mean", "value_error_sq_mean", "num_tokens")


@dataclass
class Critic:
    """A value model with its optimizer.

    Attributes:
        chunks, optimizer, scheduler: Megatron's; a model apart from the policy.
        value_step: from `make_value_step`.
        discount, gae_lambda: see `ops.gae.gae`.
        whiten_advantages: mean 0 and variance 1 over all trained tokens of a step.
        bootstrap: a response that was cut short is followed by its last token's value, not by 0.
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    value_step: ValueStep
    discount: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = True
    bootstrap: bool = False

    def add_advantages(
        self,
        mini_batches: Sequence[Sequence[MicroBatch]],
        rewards: Sequence[Sequence[Tensor]],
        is_cut: Sequence[Sequence[Tensor]],
        groups: ParallelGroups,
    ) -> None:
        """Adds `old_values`, `advantages` and `returns` to all micro-batches of a step.

        Args:
            mini_batches: this rank's micro-batches of each mini-batch, padded rows.
            rewards: of each token of each micro-batch, [rows, S].
            is_cut: of each row of each micro-batch, [rows] bool: the response was cut short.

        Communicates: one forward pass of the critic per mini-batch; whitening's all-reduces.
        """
        flat = [batch for micro_batches in mini_batches for batch in micro_batches]
        for micro_batches in mini_batches:
            for batch, values in zip(
                micro_batches, token_values(self.chunks, micro_batches), strict=True
            ):
                batch["old_values"] = values
        for batch, reward, cut in zip(flat, _flat(rewards), _flat(is_cut), strict=True):
            batch["advantages"], batch["returns"] = self._estimate(batch, reward, cut)
        if self.whiten_advantages:
            _whiten(flat, groups)

    def _estimate(self, batch: MicroBatch, rewards: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
        values = batch["old_values"]
        bootstrap = None
        if self.bootstrap:
            later = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
            bootstrap = torch.where(cut[:, None], later, 0.0)
        return gae(
            rewards,
            values,
            batch["loss_mask"],
            discount=self.discount,
            gae_lambda=self.gae_lambda,
            bootstrap_values=bootstrap,
        )

    def train(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Takes one optimizer step and returns the metrics, with "critic_" before their names."""
        metrics = train_step(
            self.value_step,
            self.chunks,
            self.optimizer,
            micro_batches,
            scheduler=self.scheduler,
        )
        return {f"critic_{k}": v for k, v in metrics.items() if k not in _PARTS}


def token_rewards(
    batch: MicroBatch, rewards: Tensor, *, kl_coef: float = 0.0, kl_estimator: str = "k1"
) -> tuple[Tensor, Tensor]:
    """Returns a micro-batch's rewards per token, and the KL that is in them.

    Formula: -kl_coef kl_t, plus the response's reward at its last trained token; kl_t between
    `old_log_probs` and `ref_log_probs`.

    Args:
        batch: with the two log-probs if kl_coef is not 0.
        rewards: [rows], of the responses.

    Returns:
        rewards, kl: [rows, S] fp32, constant.
    """
    loss_mask = batch["loss_mask"]
    kl = torch.zeros(loss_mask.shape)
    if kl_coef:
        kl = kl_penalty(batch["old_log_probs"], batch["ref_log_probs"].float(), kl_estimator)
    return kl_shaped_rewards(rewards.float(), kl, loss_mask, kl_coef=kl_coef), kl


def mean_over_step(
    name: str,
    values: Sequence[Tensor],
    micro_batches: Sequence[Mapping[str, Any]],
    groups: ParallelGroups,
) -> dict[str, float]:
    """Returns {name: mean over the trained tokens of all data-parallel ranks}.

    Communicates: as `reduce_metrics`, over the data-parallel ranks.
    """
    pairs = [
        {name: mean_pair(value, batch["loss_mask"])}
        for value, batch in zip(values, micro_batches, strict=True)
    ]
    return reduce_metrics(pairs, dp_cp_group=groups.dp)


def _whiten(micro_batches: Sequence[MicroBatch], groups: ParallelGroups) -> None:
    """Whitens the advantages of all micro-batches together; their widths differ."""
    names = ("advantages", "loss_mask")
    whole = [torch.cat([batch[name].flatten() for batch in micro_batches]) for name in names]
    white = whiten(whole[0][None], whole[1][None], dp_group=groups.dp)[0]
    parts = white.split([batch["loss_mask"].numel() for batch in micro_batches])
    for batch, part in zip(micro_batches, parts, strict=True):
        batch["advantages"] = part.view(batch["loss_mask"].shape)


def _flat(nested: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for part in nested for tensor in part]
