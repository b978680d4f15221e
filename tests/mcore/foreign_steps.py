"""Forward steps as other people write them, for the audit: plain log-softmax, no package code."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def _log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _token_loss(batch: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    ratio = (_log_probs(logits, batch["labels"]) - batch["old_log_probs"]).exp()
    advantages = batch["advantages"]
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    return torch.where(batch["loss_mask"], loss, 0.0)


def _sum(factor: float, batch: dict[str, Any], logits: torch.Tensor) -> tuple[Any, Any]:
    return factor * (_token_loss(batch, logits) * batch["loss_weights"]).sum(), {}


def _mean(batch: dict[str, Any], logits: torch.Tensor) -> tuple[Any, Any]:
    return _token_loss(batch, logits).sum() / batch["loss_mask"].sum(), {}


def _run(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["tokens"], batch["position_ids"], None)


def right(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    batch = next(data_iterator)
    factor = get_num_microbatches() * parallel_state.get_data_parallel_world_size()
    return _run(model, batch), partial(_sum, factor, batch)


def without_factor(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    batch = next(data_iterator)
    return _run(model, batch), partial(_sum, 1.0, batch)


def flipped(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    output, loss_func = right(data_iterator, model)
    return output, lambda logits: (-loss_func(logits)[0], {})


def broken(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    raise KeyError("boom")


def micro_batch_mean(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    batch = next(data_iterator)
    return _run(model, batch), partial(_mean, batch)
