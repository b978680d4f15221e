"""From single sequences to a micro-batch: padded rows, or one packed row.

A packed row [1, T] holds sequences one after another, each padded to a multiple of what the layout
needs. `cu_seqlens` has the offsets of the sequences without their padding (as if the row had
none), `cu_seqlens_padded` where they really start; both [N + 1] int32, as attention kernels for
the "thd" format take them. Labels are shifted within each sequence, so the last token of a
sequence never predicts the first token of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..types import (
    PER_TOKEN_FLOAT_FIELDS,
    PER_TOKEN_SET_FIELDS,
    ROW_FIELDS,
    TOKEN_FIELDS,
    MicroBatch,
    glossary_names,
)
from .context_parallel import pad_sequence_to
from .packed_row import packed_row

_FIELDS = (
    *TOKEN_FIELDS,
    "loss_mask",
    *PER_TOKEN_FLOAT_FIELDS,
    *PER_TOKEN_SET_FIELDS,
    *ROW_FIELDS,
)


def pad_sequences(
    sequences: Sequence[Mapping[str, Any]], *, multiple: int = 1, width: int | None = None
) -> MicroBatch:
    """Returns a micro-batch of one row per sequence, padded on the right with mask False.

    Args:
        sequences: dicts by glossary name (or an alias): `tokens` [T] int, `loss_mask` [T] bool,
            floats [T] or one number, fields of k tokens [T, k], `group_ids` one number; [T] is
            indexed like labels.
        multiple: the width is the longest T, rounded up to a multiple of it.
        width: or exactly this many tokens.

    Returns:
        [rows, width] tensors; [rows] for fields of one number per sequence.

    Raises:
        InputError: no sequence; fields differ, are unknown or have other lengths than `tokens`;
            a last token is trained without `labels`; a sequence is longer than `width`.
    """
    checked = _checked(sequences)
    longest = max(len(sequence["tokens"]) for sequence in checked)
    _check_multiple(multiple)
    width = _width(longest, multiple, width)
    return {
        name: torch.stack(
            [s[name] if s[name].dim() == 0 else _padded(s[name], width) for s in checked]
        )
        for name in checked[0]
    }


def pack_sequences(
    sequences: Sequence[Mapping[str, Any]], *, multiple: int = 1, width: int | None = None
) -> MicroBatch:
    """Returns a micro-batch of one row [1, T] that holds all sequences.

    Numbers for a whole sequence are repeated for each of its tokens; `group_ids` are dropped (make
    the weights before packing). Positions start at 0 in each sequence.

    Args:
        sequences: as in `pad_sequences`.
        multiple: each sequence is padded to a multiple of it (`sequence_multiple`).
        width: pads the row to exactly this many tokens, which become padding of the last sequence.

    Returns:
        [1, T] tensors with `labels` and `position_ids`; `cu_seqlens` and `cu_seqlens_padded`,
        [N + 1] int32.

    Raises:
        InputError: as `pad_sequences`.
    """
    checked = [_with_labels(sequence) for sequence in _checked(sequences)]
    lengths = [len(sequence["tokens"]) for sequence in checked]
    _check_multiple(multiple)
    padded = [-(-length // multiple) * multiple for length in lengths]
    padded[-1] += _width(sum(padded), multiple, width) - sum(padded)
    packed: MicroBatch = {
        name: torch.cat([_padded(s[name], size) for s, size in zip(checked, padded, strict=True)])[
            None
        ]
        for name in checked[0]
        if name not in (*ROW_FIELDS, "position_ids")
    }
    packed["position_ids"] = torch.cat([torch.arange(size) for size in padded])[None]
    packed["cu_seqlens"] = _offsets(lengths)
    packed["cu_seqlens_padded"] = _offsets(padded)
    return packed


def unpack_sequences(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> list[Tensor]:
    """Returns the sequences of a packed [1, T] tensor, without their padding.

    Raises:
        InputError: `x` is no packed row of these offsets.
    """
    given = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
    packed = packed_row(given, x)
    return [x[0, a : a + length] for a, length in zip(packed.offsets, packed.lengths)]


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _padded(x: Tensor, size: int) -> Tensor:
    return pad_sequence_to(x, size, dim=0) if len(x) else x.new_zeros(size, *x.shape[1:])


def _check_multiple(multiple: int) -> None:
    if multiple < 1:
        raise InputError(f"multiple must be at least 1, got {multiple}.")


def _width(needed: int, multiple: int, width: int | None) -> int:
    if width is None:
        return -(-needed // multiple) * multiple
    if width < needed or width % multiple:
        raise InputError(
            f"width {width} must hold {needed} tokens and be a multiple of {multiple}; take "
            f"{-(-needed // multiple) * multiple} or a larger multiple."
        )
    return width


def _checked(sequences: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    if not sequences:
        raise InputError("no sequence to collate; a filler is a sequence with mask False.")
    checked = []
    for i, sequence in enumerate(sequences):
        named = {
            k: torch.as_tensor(v) for k, v in glossary_names(sequence).items() if v is not None
        }
        _check_fields(i, named, checked[0] if checked else named)
        if "labels" not in named and bool(named["loss_mask"][-1]):
            raise InputError(
                f"sequence {i}: loss_mask is True at its last token, which has no label. Per-token "
                "tensors are indexed like labels (entry t belongs to token t + 1): shift the mask "
                "left by one, or pass 'labels'."
            )
        checked.append(named)
    return checked


def _check_fields(i: int, sequence: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
    unknown = [name for name in sequence if name not in _FIELDS]
    missing = [name for name in ("tokens", "loss_mask") if name not in sequence]
    if unknown or missing:
        raise InputError(
            f"sequence {i} needs 'tokens' and 'loss_mask' and may have {', '.join(_FIELDS)}; "
            f"missing: {missing}, not usable: {unknown}."
        )
    if set(sequence) != set(first):
        raise InputError(
            f"sequence {i} has the fields {sorted(sequence)}, the first one {sorted(first)}; "
            "sequences of a micro-batch must have the same."
        )
    shape = sequence["tokens"].shape
    if len(shape) != 1 or not shape[0]:
        raise InputError(f"sequence {i}: tokens must be [T] with T >= 1, got {tuple(shape)}.")
    if sequence["loss_mask"].dtype is not torch.bool:
        raise InputError(
            f"sequence {i}: loss_mask must be bool, got {sequence['loss_mask'].dtype}."
        )
    for name in PER_TOKEN_SET_FIELDS:
        _check_entries(i, name, sequence, first)
    for name, value in sequence.items():
        if name in PER_TOKEN_SET_FIELDS:
            continue
        alone = name in PER_TOKEN_FLOAT_FIELDS or name in ROW_FIELDS
        fits = (value.shape == shape and name not in ROW_FIELDS) or (alone and value.dim() == 0)
        if not fits or value.dim() != first[name].dim():
            raise InputError(
                f"sequence {i}: {name} has shape {tuple(value.shape)}, expected one entry per "
                f"token, {tuple(shape)}{', or one number' if alone else ''} (the same in all)."
            )


def _check_entries(
    i: int, name: str, sequence: Mapping[str, Tensor], first: Mapping[str, Tensor]
) -> None:
    if name not in sequence:
        return
    value, length = sequence[name], len(sequence["tokens"])
    wanted = first[name].shape[1:] if first[name].dim() == 2 else ("k",)
    if value.dim() != 2 or len(value) != length or value.shape[1:] != first[name].shape[1:]:
        raise InputError(
            f"sequence {i}: {name} has shape {tuple(value.shape)}, expected ({length}, "
            f"{wanted[0]}): the same number of entries for each token of all sequences."
        )


def _with_labels(sequence: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns [T] tensors: labels shifted within the sequence, numbers repeated per token."""
    tokens = sequence["tokens"]
    named = {
        name: value.expand_as(tokens) if value.dim() == 0 else value
        for name, value in sequence.items()
    }
    named.setdefault("labels", torch.cat([tokens[1:], tokens.new_zeros(1)]))
    return named
