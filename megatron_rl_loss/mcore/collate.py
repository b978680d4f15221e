"""From the sequences of a mini-batch to the micro-batches of a plan, weights first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..checks import integers, mapping_list
from ..errors import InputError
from ..parallel.packing import pack_sequences, pad_sequences
from ..parallel.token_weights import token_weights
from ..types import MicroBatch, check_same_fields, glossary_names


def with_sequence_weights(
    sequences: Sequence[Mapping[str, Any]],
    reduction: str,
    *,
    micro_batch_ids: Sequence[int] | None = None,
    dp_group: dist.ProcessGroup | None = None,
    max_seq_len: int | None = None,
    count_empty_sequences: bool = True,
) -> list[MicroBatch]:
    """Returns copies of a mini-batch's sequences with `loss_weights`, before they are collated.

    Fillers and padding rows, which are made later, are thus never counted.

    Args:
        sequences: as in `collate`, with a bool `loss_mask`; and `group_ids` for "prompt_mean".
        reduction, max_seq_len, count_empty_sequences: as in `token_weights`.
        micro_batch_ids: for "token_mean_legacy": `Plan.micro_batch_ids` (of these sequences).
        dp_group: data-parallel group without context parallelism if `sequences` are this rank's
            only; None if they are the whole mini-batch.

    Raises:
        InputError: a sequence has no mask or has weights already.

    Communicates: as `token_weights`.
    """
    named = [glossary_names(sequence) for sequence in mapping_list("sequences", sequences)]
    check_same_fields("sequence", named)
    for i, sequence in enumerate(named):
        if "loss_mask" not in sequence or "loss_weights" in sequence:
            have = "no 'loss_mask'" if "loss_mask" not in sequence else "'loss_weights' already"
            raise InputError(f"sequence {i} has {have}; weights are made from the mask, once.")
    masks = [torch.as_tensor(sequence["loss_mask"]) for sequence in named]
    group_ids = None
    if named and all("group_ids" in sequence for sequence in named):
        group_ids = torch.stack(
            [integers("group_ids", sequence["group_ids"]) for sequence in named]
        )
    weights = token_weights(
        torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        reduction,
        group_ids=group_ids,
        max_seq_len=max_seq_len,
        micro_batch_ids=None if micro_batch_ids is None else torch.tensor(micro_batch_ids),
        count_empty_sequences=count_empty_sequences,
        dp_group=dp_group,
    )
    return [
        dict(sequence, loss_weights=row[: len(mask)].clone())
        for sequence, row, mask in zip(named, weights, masks, strict=True)
    ]


def collate(
    sequences: Sequence[Mapping[str, Any]],
    indices: Sequence[int],
    *,
    packed: bool = False,
    multiple: int = 1,
    width: int | None = None,
    rows: int | None = None,
) -> MicroBatch:
    """Returns one micro-batch of a plan: padded rows, or one packed row.

    A filler (no index) is one row without a trained token, with the fields of the others.

    Args:
        sequences: the mini-batch; dicts by glossary name (or an alias): `tokens` and per-token
            tensors [T] (or [T, k]), indexed like labels, or one number for the whole sequence.
        indices: the sequences of this micro-batch.
        packed: see `pack_sequences` and `pad_sequences`.
        multiple: pads the row (packed: each sequence) to a multiple of it.
        width: pads the row to exactly this many tokens (pipeline stages need one shape).
        rows: padded only: adds rows without a trained token up to this number.

    Raises:
        InputError: fields are missing, do not fit, or do not fit into `width` or `rows`.
    """
    chosen = [sequences[i] for i in indices] or [_filler(sequences[0], width or multiple)]
    if packed:
        return pack_sequences(chosen, multiple=multiple, width=width)
    missing = 0 if rows is None else rows - len(chosen)
    if missing < 0:
        raise InputError(f"{len(chosen)} sequences do not fit into {rows} rows.")
    chosen += [_filler(sequences[0], 1) for _ in range(missing)]
    return pad_sequences(chosen, multiple=multiple, width=width)


def _filler(like: Mapping[str, Any], length: int) -> MicroBatch:
    """Returns a sequence of zeros, with the fields of `like` and a mask that is all False."""
    filler: MicroBatch = {}
    for name, value in glossary_names(like).items():
        value = torch.as_tensor(value)
        filler[name] = value.new_zeros((length, *value.shape[1:]) if value.dim() else ())
    filler["loss_mask"] = torch.zeros(length, dtype=torch.bool)
    return filler
