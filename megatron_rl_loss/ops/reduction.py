"""Token weights w_t: what each trained token counts, from global counts alone.

The loss of a mini-batch is sum_t w_t * l_t. The rule that turns counts into weights is here;
who is counted, over which ranks, is in `parallel.token_weights`.

With N trained tokens and B sequences in the mini-batch, len_i trained tokens in sequence i,
P prompts (groups), and L = max_seq_len:

    token_mean               1 / max(1, N)
    token_mean_legacy        1 / (K * max(1, n_k))   k: the micro-batch of the row, K: their number
    sequence_mean            1 / (B * max(1, len_i))
    seq_mean_token_sum_norm  1 / (B * L)
    prompt_mean              1 / (P * max(1, tokens of the row's group))
    sum                      1

A masked position has weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, InputError
from .precision import at_least_fp32

REDUCTIONS = (
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "sum",
)


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of one mini-batch over all data-parallel ranks.

    Attributes:
        num_tokens: N, trained tokens.
        num_sequences: B, sequences (padding rows and fillers never count).
        num_micro_batches: K, micro-batches of the plan over all ranks, for `token_mean_legacy`.
        micro_batch_tokens: [rows], n_k of each local row's micro-batch.
        num_groups: P, prompts, for `prompt_mean`.
        group_tokens: [rows], trained tokens (over all ranks) of each local row's group.
    """

    num_tokens: int
    num_sequences: int
    num_micro_batches: int = 0
    micro_batch_tokens: Tensor | None = None
    num_groups: int = 0
    group_tokens: Tensor | None = None


def check_reduction(reduction: str, max_seq_len: int | None = None) -> None:
    """Raises `ConfigError` if the reduction is unknown or lacks what it needs."""
    if reduction not in REDUCTIONS:
        raise ConfigError(f"unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}.")
    if reduction == "seq_mean_token_sum_norm" and (max_seq_len is None or max_seq_len <= 0):
        raise ConfigError(
            "reduction 'seq_mean_token_sum_norm' needs max_seq_len > 0, the fixed length L that "
            f"every sequence is divided by (the padded width would change it); got {max_seq_len}."
        )


def row_scale(
    loss_mask: Tensor, reduction: str, counts: GlobalCounts, *, max_seq_len: int | None = None
) -> Tensor:
    """Returns [rows, 1] fp64: the weight of a trained token of each row.

    Args:
        loss_mask: [rows, S] bool, whole sequences (before any context-parallel split).
        reduction: one of `REDUCTIONS`.
        counts: of the whole mini-batch.
        max_seq_len: L of `seq_mean_token_sum_norm`.
    """
    check_reduction(reduction, max_seq_len)
    ones = torch.ones(loss_mask.shape[0], 1, dtype=torch.float64, device=loss_mask.device)
    num_sequences = max(1, counts.num_sequences)
    if reduction == "sum":
        return ones
    if reduction == "token_mean":
        return ones / max(1, counts.num_tokens)
    if reduction == "seq_mean_token_sum_norm":
        return ones / (num_sequences * max_seq_len)
    if reduction == "sequence_mean":
        return ones / (num_sequences * _column(loss_mask.sum(dim=1)))
    if reduction == "token_mean_legacy":
        return ones / (max(1, counts.num_micro_batches) * _column(counts.micro_batch_tokens))
    return ones / (max(1, counts.num_groups) * _column(counts.group_tokens))


def _column(tokens: Tensor | None) -> Tensor:
    assert tokens is not None, "the counts were gathered for another reduction"
    return tokens.clamp(min=1).to(torch.float64).unsqueeze(1)


def weights_from_counts(
    loss_mask: Tensor, reduction: str, counts: GlobalCounts, *, max_seq_len: int | None = None
) -> Tensor:
    """Returns w, fp32 [rows, S]: `row_scale` at trained positions, 0 elsewhere; constant."""
    scale = row_scale(loss_mask, reduction, counts, max_seq_len=max_seq_len)
    return torch.where(loss_mask, scale, 0.0).float()


def masked_sum(token_loss: Tensor, loss_weights: Tensor) -> Tensor:
    """Returns sum_t w_t * l_t, a 0-dimensional tensor, fp32 (fp64 for an fp64 loss).

    A position with weight 0 adds exactly 0 to the value and to every gradient, whatever
    `token_loss` holds there (NaN and inf included).

    Args:
        token_loss: any shape, un-reduced; gets the gradient.
        loss_weights: same shape, float, any sign; constant.

    Raises:
        InputError: the shapes differ (nothing is broadcast).

    >>> masked_sum(torch.tensor([0.148721, float("nan")]), torch.tensor([0.5, 0.0]))
    tensor(0.0744)
    """
    if token_loss.shape != loss_weights.shape:
        raise InputError(
            f"token_loss has shape {tuple(token_loss.shape)} but loss_weights has "
            f"{tuple(loss_weights.shape)}; both must have one entry per token."
        )
    weights = at_least_fp32(loss_weights.detach())
    return (torch.where(weights != 0, at_least_fp32(token_loss), 0.0) * weights).sum()
