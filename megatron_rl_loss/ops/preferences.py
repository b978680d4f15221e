"""Pairwise preference losses as advantages, so that a pair need not share a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError, InputError


def dpo_advantages(
    log_prob_sums: Tensor,
    ref_log_prob_sums: Tensor,
    pair_ids: Tensor,
    is_chosen: Tensor,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Returns advantages whose policy gradient is that of the DPO loss, and the loss itself.

    Formula: m = (s_c - s_c_ref) - (s_r - s_r_ref) for the chosen and the rejected response of a
    pair; loss = -log sigmoid(beta m); A_c = -A_r = 2 beta sigmoid(-beta m). With the loss
    `policy_gradient` and the reduction `seq_mean_token_sum_norm`, max_seq_len=1 (w = 1 / B, two
    sequences a pair), the gradient is that of the mean loss over pairs.

    The log-prob sums must be those of the weights that the gradient is taken at: sum
    `token_log_probs` over the trained tokens first, and take one optimizer step. That one more
    forward pass is the price of cutting the mini-batch anywhere.

    Args:
        log_prob_sums, ref_log_prob_sums: [N], of each whole response, policy and reference, nats,
            constant. The whole mini-batch, or at least whole pairs.
        pair_ids: [N] int; each occurs twice.
        is_chosen: [N] bool; once True and once False in each pair.
        beta: > 0.

    Returns:
        advantages [N] fp32; losses [N] fp32, each pair's loss at both of its responses.

    Raises:
        ConfigError: beta is not above 0.
        InputError: shapes differ, or a pair is not one chosen and one rejected response.

    Source: Rafailov et al., "Direct Preference Optimization" (2023).

    >>> s = torch.tensor([-5.0, -6.0])
    >>> dpo_advantages(s, s, torch.tensor([7, 7]), torch.tensor([True, False]), beta=1.0)
    (tensor([ 1., -1.]), tensor([0.6931, 0.6931]))
    """
    if not beta > 0.0:
        raise ConfigError(f"beta must be > 0, got {beta}.")
    _check(log_prob_sums, ref_log_prob_sums, pair_ids, is_chosen)
    numbers, pair = torch.unique(pair_ids, return_inverse=True)
    sign = torch.where(is_chosen, 1.0, -1.0).double()
    gaps = sign * (log_prob_sums.detach().double() - ref_log_prob_sums.detach().double())
    margins = torch.zeros(len(numbers), dtype=torch.float64, device=gaps.device)
    margins = margins.index_add(0, pair, gaps)[pair]
    losses = -torch.nn.functional.logsigmoid(beta * margins)
    return (2.0 * beta * sign * torch.sigmoid(-beta * margins)).float(), losses.float()


def _check(sums: Tensor, ref_sums: Tensor, pair_ids: Tensor, is_chosen: Tensor) -> None:
    shapes = {tuple(x.shape) for x in (sums, ref_sums, pair_ids, is_chosen)}
    if len(shapes) > 1 or sums.dim() != 1:
        raise InputError(f"all arguments must be [N], one entry per response, got {shapes}.")
    if is_chosen.dtype != torch.bool:
        raise InputError(f"is_chosen must be bool, got {is_chosen.dtype}.")
    ids, counts = torch.unique(torch.stack([pair_ids.long(), is_chosen.long()]), dim=1,
                               return_counts=True)  # fmt: skip
    whole = torch.unique(ids[0], return_counts=True)[1]
    if bool((counts != 1).any()) or bool((whole != 2).any()):
        raise InputError(
            "each pair_id must have exactly one chosen and one rejected response; a pair must not "
            "be split over calls."
        )
