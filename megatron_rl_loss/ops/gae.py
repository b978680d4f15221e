"""Generalised advantage estimation over rows with gaps, packed or padded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_loss_mask, check_same_shape
from ..errors import ConfigError


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    discount: float = 1.0,
    gae_lambda: float = 0.95,
    segment_ids: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns of each trained token.

    Formula: over the trained tokens of a sequence, one after the other,
    delta_t = r_t + discount V_{t+1} - V_t, A_t = delta_t + discount lambda A_{t+1},
    returns = A_t + V_t. Masked positions (prompt, tool output, padding) are not steps: the token
    before a gap is followed by the first one after it. After the last token V is the bootstrap.

    Args:
        rewards: [rows, S] float, reward units; masked positions are ignored.
        values: [rows, S] float, V_t, constant.
        loss_mask: [rows, S] bool, trained tokens.
        discount, gae_lambda: in [0, 1].
        segment_ids: [rows, S] int, the sequence of each position in packed rows; sequences are
            contiguous. None: a row is a sequence.
        bootstrap_values: [rows, S] float, read at the last trained token of each sequence: the
            value of the state after it, for sequences that were cut short. None: 0.

    Returns:
        (advantages, returns), [rows, S] fp32 each, constant, 0 at masked positions.

    Raises:
        ConfigError: discount or gae_lambda is not in [0, 1].
        InputError: shapes differ.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (2016).

    >>> reward, value = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    >>> gae(reward, value, torch.ones(1, 2, dtype=torch.bool), gae_lambda=1.0)
    (tensor([[0.5000, 0.7500]]), tensor([[1., 1.]]))
    """
    _check(rewards, values, loss_mask, discount, gae_lambda, segment_ids, bootstrap_values)
    reward, value = (torch.where(loss_mask, x.detach().double(), 0.0) for x in (rewards, values))
    goes_on = _goes_on(loss_mask, segment_ids)
    # value of the next trained token: passed backwards through masked positions
    next_mask = _shifted(loss_mask.double()) * goes_on
    next_value = _scan(next_mask * _shifted(value), goes_on - next_mask)
    if bootstrap_values is not None:
        last = loss_mask & (_scan(next_mask, goes_on - next_mask) == 0)
        next_value = torch.where(last, bootstrap_values.detach().double(), next_value)
    delta = torch.where(loss_mask, reward + discount * next_value - value, 0.0)
    decay = torch.where(loss_mask, discount * gae_lambda, 1.0) * goes_on
    advantages = torch.where(loss_mask, _scan(delta, decay), 0.0)
    return advantages.float(), torch.where(loss_mask, advantages + value, 0.0).float()


def _goes_on(loss_mask: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Returns 1.0 where the next position, if there is one, belongs to the same sequence."""
    same = torch.ones_like(loss_mask, dtype=torch.float64)
    if segment_ids is not None:
        same[:, :-1] = (segment_ids[:, 1:] == segment_ids[:, :-1]).double()
    return same


def _shifted(x: Tensor) -> Tensor:
    """Returns x of the next position, 0 after the last one."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _scan(terms: Tensor, factors: Tensor) -> Tensor:
    """Returns y with y_t = terms_t + factors_t y_{t+1}, in log2(S) steps over the whole row."""
    step, length = 1, terms.shape[1]
    while step < length:
        later_terms, later_factors = (
            torch.nn.functional.pad(x[:, step:], (0, step)) for x in (terms, factors)
        )
        terms = terms + factors * later_terms
        factors = factors * later_factors
        step *= 2
    return terms


def _check(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    discount: float,
    gae_lambda: float,
    segment_ids: Tensor | None,
    bootstrap_values: Tensor | None,
) -> None:
    for name, value in (("discount", discount), ("gae_lambda", gae_lambda)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} must be in [0, 1], got {value}.")
    check_loss_mask(loss_mask)
    named = {
        "rewards": rewards,
        "values": values,
        "segment_ids": segment_ids,
        "bootstrap_values": bootstrap_values,
    }
    for name, tensor in named.items():
        if tensor is not None:
            check_same_shape(name, tensor, "loss_mask", loss_mask)
