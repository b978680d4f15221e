"""From rollouts to training sequences, whose per-token tensors are indexed like labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .rollout import Rollout, group_number

# (rewards [N], group ids [N], trained tokens [N]) -> advantages [N]
AdvantageEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]

_OPTIONAL_TENSORS = {
    "rollout_log_probs": torch.float32,
    "ref_log_probs": torch.float32,
    "teacher_top_ids": torch.int64,
    "teacher_top_log_probs": torch.float32,
}


def training_sequence(
    rollout: Rollout, advantage: float | Sequence[float], group_id: int
) -> dict[str, Tensor]:
    """Returns one sequence as 1-D tensors [T], T = prompt + response tokens.

    Entry t belongs to the prediction of token t + 1, so the response's values start at the last
    prompt position, and the last entry is never trained.

    Args:
        rollout: prompt and response.
        advantage: of the response, or one value per response token.
        group_id: of the prompt, int64.

    Returns:
        `tokens`, `loss_mask` (bool), `advantages`, `group_ids` (0-dimensional), and the rollout's
        `rollout_log_probs`, `ref_log_probs`, and [T, k] `teacher_top_ids` (int64) and
        `teacher_top_log_probs` where it has them, fp32.
    """
    tokens = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.response_ids]))
    tokens = tokens.to(torch.int64)
    sequence = {
        "tokens": tokens,
        "loss_mask": _at_labels(rollout, rollout.loss_mask, torch.bool),
        "advantages": _at_labels(rollout, advantage, torch.float32),
        "group_ids": torch.tensor(group_id),
    }
    for name, dtype in _OPTIONAL_TENSORS.items():
        if getattr(rollout, name) is not None:
            sequence[name] = _at_labels(rollout, getattr(rollout, name), dtype)
    return sequence


def _at_labels(rollout: Rollout, values: object, dtype: torch.dtype) -> Tensor:
    given = torch.tensor(values, dtype=dtype)
    per_label = torch.zeros(rollout.num_tokens, *given.shape[1:], dtype=dtype)
    start = len(rollout.prompt_ids) - 1
    per_label[start : start + len(rollout.response_ids)] = given
    return per_label


def group_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """Returns the group of each rollout as int64; one without `group_id` is a group of its own.

    >>> group_numbers([Rollout([1], [2]), Rollout([1], [3], group_id=5)])
    [-1, 5]
    """
    return [
        -1 - i if rollout.group_id is None else group_number(rollout.group_id)
        for i, rollout in enumerate(rollouts)
    ]


def rollout_advantages(
    rollouts: Sequence[Rollout], numbers: Sequence[int], estimator: AdvantageEstimator | None
) -> Sequence[Any]:
    """Returns one advantage (or list of them, one per response token) per rollout.

    Args:
        rollouts: of all ranks.
        numbers: their groups, as `group_numbers` returns them.
        estimator: makes them from the rewards, in float64; None: the rollouts carry them.

    Raises:
        ConfigError: rollouts lack what they are made of.
    """
    source = "advantage" if estimator is None else "reward"
    missing = sum(getattr(rollout, source) is None for rollout in rollouts)
    if missing:
        raise ConfigError(
            f"{missing} of {len(rollouts)} rollouts have no {source!r}; advantage.estimator=none "
            "reads 'advantage', the others read 'reward'."
        )
    if estimator is None:
        return [rollout.advantage for rollout in rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    num_tokens = torch.tensor([int(sum(rollout.loss_mask)) for rollout in rollouts])
    return estimator(rewards, torch.tensor(numbers), num_tokens).tolist()


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the mean `reward` (where given), `response_length` and `finished` fraction."""
    num = len(rollouts)
    metrics = {"response_length": sum(len(r.response_ids) for r in rollouts) / num}
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    finished = [bool(r.metadata["finished"]) for r in rollouts if "finished" in r.metadata]
    if finished:
        metrics["finished"] = sum(finished) / len(finished)
    return metrics
