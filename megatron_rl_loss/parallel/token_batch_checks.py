"""Checks of a micro-batch that need more than one of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import as_tensor
from ..errors import InputError
from .packed_row import PackedRow


def check_token_ids(tokens: Tensor, vocab_size: int | None) -> None:
    """Raises `InputError` naming the first id outside the vocabulary.

    A vocabulary that is sharded looks such an id up as zeros, without an error.
    """
    if tokens.device.type != "cpu":
        return
    bad = tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
    if bool(bad.any()):
        row, position = (int(x) for x in bad.nonzero()[0])
        bound = "" if vocab_size is None else f" and below the vocabulary of {vocab_size}"
        raise InputError(
            f"tokens is {int(tokens[row, position])} at row {row}, position {position}; token ids "
            f"must be at least 0{bound}, at padding too."
        )


def check_attention_mask(
    given: Mapping[str, Any], tokens: Tensor, packed: PackedRow | None, cp_size: int
) -> None:
    """Raises `InputError` unless a given mask is one that Megatron's attention takes here."""
    if "attention_mask" not in given:
        return
    if packed is not None or cp_size > 1:
        raise InputError(
            "attention_mask works neither with packed sequences nor with context parallelism; "
            "leave it out: padding on the right needs none under causal attention."
        )
    mask, (rows, length) = as_tensor("attention_mask", given["attention_mask"]), tokens.shape
    shapes = [(n, 1, length, length) for n in (rows, 1)]
    if mask.dtype is not torch.bool or tuple(mask.shape) not in shapes:
        raise InputError(
            f"attention_mask must be bool, {shapes[0]} or {shapes[1]}, True where a token may "
            f"**not** attend (Megatron's convention), got {mask.dtype} {tuple(mask.shape)}. Leave "
            "a [rows, S] padding mask out: padding on the right needs none under causal attention."
        )


def check_shifted(labels: Tensor, tokens: Tensor, loss_mask: Tensor) -> None:
    """Raises `InputError` if the labels are the tokens themselves."""
    if labels.device.type != "cpu" or not bool(loss_mask.any()):
        return
    copies = bool((labels == tokens)[loss_mask].all())
    following = (labels[:, :-1] == tokens[:, 1:]) | ~loss_mask[:, :-1]
    if copies and not bool(following.all()):
        raise InputError(
            "labels equal tokens at every trained position: they were not shifted, and the model "
            "would learn to repeat its input. labels[t] is tokens[t + 1]; leave 'labels' out to "
            "have them made, and index every per-token tensor like them."
        )


def check_present(needs: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Raises `InputError` naming what the loss reads and the micro-batch lacks."""
    missing = [name for name in needs if name not in tensors]
    if not missing:
        return
    hint = ""
    if "old_log_probs" in missing:
        hint = (
            " old_log_probs are the trainer's log-probs before the first step on this batch; "
            "on_policy=True takes the current ones when a batch is used for one step only."
        )
    raise InputError(
        f"micro-batch lacks {', '.join(map(repr, missing))}, which the loss reads; it has: "
        f"{', '.join(tensors) or 'no per-token floats'}.{hint}"
    )
