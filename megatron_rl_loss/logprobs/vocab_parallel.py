"""Log-probs, entropy and their kin from logits whose vocabulary may be sharded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .backends import choose_rows
from .inputs import (
    VocabShard,
    check_label_values,
    check_log_prob_values,
    check_logits_and_labels,
    check_temperature,
    check_token_ids,
    logit_rows,
    row_layout,
    vocab_shard,
)
from .row_function import RowLogProbs, RowPlan
from .top_ids import top_ids


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
    backend: str | None = None,
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
        backend: "eager", "compiled" or "triton"; None chooses, see `backends.choose_rows`.
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
            through overwritten logits, or one with create_graph.

    Communicates: two all-reduces in forward (MAX of [N], SUM of [2 or 3, N] fp32 for N
        positions), none in backward. Every rank of tp_group must call with the same labels.
    Gradient: each rank gets its shard's; it must pass the same gradients of the results on every
        rank of tp_group, as a loss computed alike on all of them does. Rows whose gradient is
        exactly 0 give exactly 0, even if they hold NaN. First order only.

    >>> lp, _ = vocab_parallel_log_probs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    >>> round(lp.item(), 6)
    -0.693147
    """
    outputs = vocab_parallel_outputs(
        logits,
        labels,
        tp_group=tp_group,
        temperature=temperature,
        with_entropy=with_entropy,
        vocab_size=vocab_size,
        loss_mask=loss_mask,
        inplace_backward=inplace_backward,
        backend=backend,
        debug=debug,
    )
    return outputs.log_probs, outputs.entropy


class VocabOutputs(NamedTuple):
    """What one pass over the logits gives; None where it was not asked for.

    Attributes:
        log_probs: [...] of the labels, with gradient.
        entropy: [...], with gradient.
        is_argmax: [...] bool: the label's logit is the largest of the real vocabulary (ties
            count as hits).
        token_log_probs: [..., K] of `token_ids`, with gradient.
        top_log_probs: [..., top_k], descending, with gradient.
        top_ids: [..., top_k] int64 global ids.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_argmax: Tensor | None = None
    token_log_probs: Tensor | None = None
    top_log_probs: Tensor | None = None
    top_ids: Tensor | None = None


def vocab_parallel_outputs(
    logits: Tensor,
    labels: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    top_k: int = 0,
    tp_group: Any = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    vocab_size: int | None = None,
    loss_mask: Tensor | None = None,
    inplace_backward: bool | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> VocabOutputs:
    """Everything `vocab_parallel_log_probs` gives, and log-probs of other tokens, in one pass.

    For distillation (top-k, or a given token set) and metrics (argmax match, entropy alone).
    Arguments not listed here, errors and gradients are those of `vocab_parallel_log_probs`.

    Args:
        labels: as there, or None: then log_probs and is_argmax are None.
        token_ids: [..., K] int64 global ids, constant; the same id may appear twice. Checked as
            labels are.
        top_k: how many of the most probable tokens to return; finding them reads the logits a
            second time.

    Communicates: the two all-reduces, the SUM one with K + top_k rows more; with top_k also two
        all-gathers of [N, top_k].
    """
    check_inputs(logits, labels, token_ids, loss_mask)
    shard = vocab_shard(logits.shape[-1], vocab_size, tp_group)
    temperature = check_temperature(temperature)
    check_ids(labels, token_ids, loss_mask, shard.vocab_size, debug)
    layout = row_layout(logits)
    if layout is None:
        logits = logits.contiguous()
        layout = row_layout(logits)
    check_overwrite(logits, inplace_backward)
    rows = choose_rows(logits, backend)
    plan = RowPlan(layout, shard, 1.0 / temperature, with_entropy, inplace_backward, rows)
    groups = _wanted_ids(logits, labels, token_ids, top_k, plan)
    log_probs, entropy, is_top = RowLogProbs.apply(logits, torch.cat(groups, 1), plan)
    parts = [layout.from_rows(x) for x in log_probs.split([g.shape[1] for g in groups], 1)]
    outputs = VocabOutputs(
        log_probs=None if labels is None else parts[0][..., 0],
        entropy=None if entropy is None else layout.from_rows(entropy),
        is_argmax=None if labels is None else layout.from_rows(is_top[:, 0]),
        token_log_probs=None if token_ids is None else parts[1],
        top_log_probs=parts[2] if top_k else None,
        top_ids=layout.from_rows(groups[2]) if top_k else None,
    )
    outputs = VocabOutputs(*(keep_trained(x, loss_mask) for x in outputs))
    if debug and labels is not None:
        check_log_prob_values(outputs.log_probs, loss_mask)
    return outputs


def _wanted_ids(
    logits: Tensor, labels: Tensor | None, token_ids: Tensor | None, top_k: int, plan: RowPlan
) -> list[Tensor]:
    """[N, 0 or 1], [N, K or 0], [N, top_k]: the ids whose log-probs the pass returns."""
    to_rows, num_rows = plan.layout.to_rows, logits.shape[:-1].numel()
    none = torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    groups = [none, none, none]
    if labels is not None:
        groups[0] = to_rows(labels.long())[:, None]
    if token_ids is not None:
        columns = token_ids.long().movedim(-1, 0)
        groups[1] = torch.stack([to_rows(c) for c in columns], 1) if len(columns) else none
    if top_k:
        check_top_k(top_k, plan.shard)
        groups[2] = top_ids(logit_rows(logits, plan.layout), top_k, plan.shard)
    return groups


def keep_trained(x: Tensor | None, loss_mask: Tensor | None) -> Tensor | None:
    """Returns x with exact 0 (False), and no gradient, where loss_mask is False."""
    if x is None or loss_mask is None:
        return x
    mask = loss_mask.bool().view(*loss_mask.shape, *[1] * (x.ndim - loss_mask.ndim))
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def check_inputs(
    logits: Tensor, labels: Tensor | None, token_ids: Tensor | None, loss_mask: Tensor | None
) -> None:
    """Raises InputError unless shapes and dtypes of one call fit together."""
    check_logits_and_labels(logits, labels, loss_mask)
    if token_ids is not None:
        if token_ids.ndim != logits.ndim:
            raise InputError(
                f"token_ids must be [..., K] with the leading shape of logits "
                f"{list(logits.shape)}, got {list(token_ids.shape)}."
            )
        check_token_ids("token_ids", token_ids, (*logits.shape[:-1], token_ids.shape[-1]))


def check_ids(
    labels: Tensor | None,
    token_ids: Tensor | None,
    loss_mask: Tensor | None,
    vocab_size: int,
    debug: bool,
) -> None:
    """Raises InputError where a trained position's ids are not tokens; on GPUs if debug."""
    for ids, name in ((labels, "label"), (token_ids, "token_id")):
        if ids is not None and loss_mask is not None and (debug or not ids.is_cuda):
            check_label_values(ids, loss_mask, vocab_size, name)


def check_top_k(top_k: int, shard: VocabShard) -> None:
    """Raises InputError unless the vocabulary has that many tokens."""
    if not 0 < top_k <= shard.vocab_size:
        raise InputError(f"top_k must be in 1..{shard.vocab_size} (vocab_size), got {top_k}.")


def check_overwrite(logits: Tensor, inplace_backward: bool | None) -> None:
    """Raises InputError if the caller asks to overwrite memory that is a parameter's."""
    base = logits if logits._base is None else logits._base
    if inplace_backward and base.requires_grad and base.is_leaf:
        raise InputError(
            "inplace_backward=True would overwrite a leaf tensor, whose .grad would then be the "
            "same memory; pass inplace_backward=None or False."
        )
