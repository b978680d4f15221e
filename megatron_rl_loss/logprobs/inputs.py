"""What the log-prob functions check and derive before the arithmetic: shards, rows, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError


class VocabShard(NamedTuple):
    """Which columns of the vocabulary this rank holds.

    Attributes:
        start: global id of this rank's column 0.
        num_valid: its first columns that belong to the real vocabulary (0 for a padding shard).
        vocab_size: the real vocabulary, over all ranks.
        group: tensor-parallel process group, None when there is one rank.
    """

    start: int
    num_valid: int
    vocab_size: int
    group: Any


class RowLayout(NamedTuple):
    """The order in which [..., V] is read as rows without a copy; `dims` sorts by stride."""

    dims: tuple[int, ...]
    shape: tuple[int, ...]

    def to_rows(self, x: Tensor) -> Tensor:
        """[...] -> [N]; a copy only where the layout is not [...]'s own."""
        return x.permute(self.dims).reshape(-1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [..., ...]: the inverse, a view."""
        ordered = rows.view((*(self.shape[d] for d in self.dims), *rows.shape[1:]))
        inverse = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return ordered.permute((*inverse, *range(len(self.dims), ordered.ndim)))


def vocab_shard(num_columns: int, vocab_size: int | None, tp_group: Any) -> VocabShard:
    """Returns this rank's shard; shard r holds the columns from r * num_columns on.

    Raises:
        InputError: vocab_size is not in 1 .. num_columns * group size.
    """
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), dist.get_rank(tp_group))
    total = num_columns * size
    if vocab_size is None:
        vocab_size = total
    if not 0 < vocab_size <= total:
        raise InputError(
            f"vocab_size is {vocab_size}, but {size} shard(s) of {num_columns} columns hold "
            f"{total}; give the real vocabulary, at most that."
        )
    start = rank * num_columns
    num_valid = min(max(vocab_size - start, 0), num_columns)
    return VocabShard(start, num_valid, vocab_size, tp_group if size > 1 else None)


def row_layout(logits: Tensor) -> RowLayout | None:
    """Returns how to read the logits as rows in place, None where only a copy could."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        return None
    leading = range(logits.ndim - 1)
    if any(logits.stride(d) == 0 and logits.shape[d] > 1 for d in leading):
        return None
    dims = tuple(sorted(leading, key=logits.stride, reverse=True))
    try:
        _view_rows(logits, dims)
    except RuntimeError:
        return None
    return RowLayout(dims, tuple(logits.shape[:-1]))


def logit_rows(logits: Tensor, layout: RowLayout) -> Tensor:
    """[..., V] -> [N, V], a view without gradient."""
    return _view_rows(logits.detach(), layout.dims)


def _view_rows(logits: Tensor, dims: Sequence[int]) -> Tensor:
    num_rows = math.prod(logits.shape[:-1])
    return logits.permute((*dims, logits.ndim - 1)).view(num_rows, logits.shape[-1])


def check_logits_and_labels(
    logits: Tensor, labels: Tensor | None, loss_mask: Tensor | None
) -> None:
    """Raises InputError unless shapes, dtypes and devices fit; looks at no value."""
    if not logits.is_floating_point() or logits.ndim < 1 or logits.shape[-1] == 0:
        raise InputError(
            f"logits must be floating point [..., V] with V > 0, got {logits.dtype} "
            f"{list(logits.shape)}."
        )
    if labels is not None:
        check_token_ids("labels", labels, logits.shape[:-1])
        if labels.device != logits.device:
            raise InputError(f"labels are on {labels.device}, logits on {logits.device}.")
    check_loss_mask(loss_mask, logits.shape[:-1])


def check_token_ids(name: str, ids: Tensor, shape: Sequence[int]) -> None:
    """Raises InputError unless `ids` holds integers of the given shape."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"{name} must be integer token ids, got {ids.dtype}.")
    if tuple(ids.shape) != tuple(shape):
        raise InputError(
            f"{name} must have shape {list(shape)} (one per row of logits), got "
            f"{list(ids.shape)}; transpose or shift before the call."
        )


def check_loss_mask(loss_mask: Tensor | None, shape: Sequence[int]) -> None:
    """Raises InputError unless the mask is None or has one entry per position."""
    if loss_mask is not None and tuple(loss_mask.shape) != tuple(shape):
        raise InputError(
            f"loss_mask must have shape {list(shape)} (one entry per row of logits), got "
            f"{list(loss_mask.shape)}."
        )


def check_temperature(temperature: float) -> float:
    """Returns the temperature; raises InputError unless it is a finite number above 0."""
    if not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
        raise InputError(
            f"temperature must be a finite number > 0, got {temperature!r}; greedy sampling has "
            "no log-probs to train on, use 1.0."
        )
    return float(temperature)


def check_label_values(
    labels: Tensor, loss_mask: Tensor, vocab_size: int, name: str = "label"
) -> None:
    """Raises InputError where a trained position's label is not a token; reads the values.

    Args:
        labels: shape of loss_mask, or with a last dimension more: several ids per position.
        name: of one id, for the message.
    """
    trained = loss_mask.bool().view(*loss_mask.shape, *[1] * (labels.ndim - loss_mask.ndim))
    bad = trained & ((labels < 0) | (labels >= vocab_size))
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise InputError(
            f"{name} {labels[where].item()} at trained position {list(where)} is outside the "
            f"vocabulary 0..{vocab_size - 1} ({int(bad.sum())} such {name}(s)); mask the position "
            f"or correct {name}s / vocab_size."
        )


def check_log_prob_values(log_probs: Tensor, loss_mask: Tensor | None) -> None:
    """Raises InputError where a trained position's log-prob is not finite; reads the values."""
    bad = ~log_probs.detach().isfinite()
    if loss_mask is not None:
        bad &= loss_mask.bool()
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise InputError(
            f"log-prob {log_probs[where].item()} at trained position {list(where)} is not finite "
            f"({int(bad.sum())} such position(s)): its logits hold NaN or +inf, or its label's "
            "logit is -inf or its label is outside the vocabulary; mask it or find the cause."
        )
