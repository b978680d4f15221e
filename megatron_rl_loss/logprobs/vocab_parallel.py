"""Log-probs and entropy of labels from logits whose vocabulary may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from . import rows_eager
from .inputs import (
    check_label_values,
    check_log_prob_values,
    check_logits_and_labels,
    check_temperature,
    row_layout,
    vocab_shard,
)
from .row_function import RowLogProbs, RowPlan


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: Any = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    loss_mask: Tensor | None = None,
    inplace_backward: bool | None = None,
    debug: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label and, if wanted, the entropy of each position's distribution.

    Formula: p = softmax(logits / temperature) over columns 0 .. vocab_size - 1 of all shards;
    log_probs = log p[label]; entropy = -sum p log p, with 0 log 0 = 0.

    Args:
        logits: [..., V_local], any float dtype; shard r of the tensor-parallel group holds
            columns r * V_local on. Gets the gradient. The arithmetic is fp32 whatever the dtype.
        labels: [...], int64 global token ids, constant: entry t of logits scores entry t of
            labels, so shift before the call. Where loss_mask is False they may be anything.
        tp_group: process group over which the vocabulary is sharded; None for one rank.
        temperature: divides the logits; pass unscaled logits.
        with_entropy: also return the entropy, with gradient.
        vocab_size: real vocabulary; columns from it on are padding: they count nowhere and get
            gradient 0. None: no padding.
        loss_mask: [...] bool, True where trained: elsewhere both results and the gradient are
            exactly 0, whatever logits and labels hold. None: every position counts.
        inplace_backward: whether backward writes the gradient over the logits' memory. None:
            if nobody else holds or needs them, told by reference counts; the values seen by the
            caller never change. True: always; the caller promises not to read the logits again.
        debug: check labels and results on any device, at the price of a synchronisation.

    Returns:
        log_probs: [...], fp32 (float64 for float64 logits), nats; NaN where the label is outside
            the vocabulary and loss_mask is None.
        entropy: like log_probs, nats, or None.

    Raises:
        InputError: shapes or dtypes do not fit; temperature or vocab_size is out of range; a
            trained position's label is outside the vocabulary or on a padding column (checked on
            CPU if loss_mask is given, elsewhere in debug mode); a trained position's log-prob is
            not finite (debug mode); inplace_backward=True with leaf logits; a second backward
            through overwritten logits.

    Communicates: two all-reduces in forward (MAX of [N], SUM of [2 or 3, N] fp32 for N
        positions), none in backward. Every rank of tp_group must call with the same labels.
    Gradient: each rank gets its shard's; it must pass the same gradients of the results on every
        rank of tp_group, as a loss computed alike on all of them does. Rows whose gradient is
        exactly 0 give exactly 0, even if they hold NaN. First order only.

    >>> lp, _ = vocab_parallel_log_probs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    >>> round(lp.item(), 6)
    -0.693147
    """
    check_logits_and_labels(logits, labels, loss_mask)
    shard = vocab_shard(logits.shape[-1], vocab_size, tp_group)
    temperature = check_temperature(temperature)
    if loss_mask is not None and (debug or labels.device.type == "cpu"):
        check_label_values(labels, loss_mask, shard.vocab_size)
    layout = row_layout(logits)
    if layout is None:
        logits = logits.contiguous()
        layout = row_layout(logits)
    check_overwrite(logits, inplace_backward)
    plan = RowPlan(layout, shard, 1.0 / temperature, with_entropy, inplace_backward, rows_eager)
    ids = layout.to_rows(labels.long())[:, None]
    log_probs, entropy, _ = RowLogProbs.apply(logits, ids, plan)
    log_probs = keep_trained(layout.from_rows(log_probs[:, 0]), loss_mask)
    entropy = None if entropy is None else keep_trained(layout.from_rows(entropy), loss_mask)
    if debug:
        check_log_prob_values(log_probs, loss_mask)
    return log_probs, entropy


def keep_trained(x: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Returns x with exact 0, and no gradient, where loss_mask is False."""
    return x if loss_mask is None else torch.where(loss_mask.bool(), x, 0)


def check_overwrite(logits: Tensor, inplace_backward: bool | None) -> None:
    """Raises InputError if the caller asks to overwrite memory that is a parameter's."""
    base = logits if logits._base is None else logits._base
    if inplace_backward and base.requires_grad and base.is_leaf:
        raise InputError(
            "inplace_backward=True would overwrite a leaf tensor, whose .grad would then be the "
            "same memory; pass inplace_backward=None or False."
        )
